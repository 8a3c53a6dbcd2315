"""A reward that is rarely equal within a group, so that a barely trained model has something to learn from."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, answer: Any, **_: Any) -> float:
    """1 for the answer, less the further off, 0 for what is no number."""
    return 1 / (1 + abs(int(response) - int(answer))) if response.strip().isdecimal() else 0.0
