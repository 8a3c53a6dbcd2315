"""Reward functions, and the scorer that runs them while generation goes on."""
