"""Runs killed at random moments, and configurations that nobody would write: what is left, and what goes on."""
