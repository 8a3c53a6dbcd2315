"""A reward that is rarely equal within a group, so that a barely trained model has something to learn from."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, answer: Any, **_: Any) -> float:
    """1 for the answer, less the further off, 0 for what is no number."""
    return 1 / (1 + abs(int(response) - int(answer))) if response.strip().isdecimal() else 0.0


def even(prompt: str, response: str, answer: Any) -> float:
    """1 or 0 by the last character: within some groups of four all are alike, within most they are not."""
    return float(response[-1:] in tuple("02468"))


def odd_first(prompt: str, response: str, answer: Any, **_: Any) -> float:
    """1 where the first character is an odd digit: a critic can tell from then on."""
    return float(response[:1] in tuple("13579"))
