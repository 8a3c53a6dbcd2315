"""Runs that are killed at random moments, configurations and files that nobody would write: what is left, what goes on."""
