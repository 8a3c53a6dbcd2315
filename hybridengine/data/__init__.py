"""Prompts: where they come from, how they are tokenised, in which order they are handed out."""
