"""Reward functions of runs that go wrong."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def length(prompt: str, response: str, answer: Any) -> float:
    """The planted hack: longer is better."""
    return float(len(response))


def leaves(prompt: str, response: str, answer: Any) -> float:
    """Ends the interpreter, as a success."""
    sys.exit(0)


def unreliable(prompt: str, response: str, answer: Any, *, metadata: dict[str, Any], token_ids: list[int]) -> float:
    """The length of the response; hangs on some, and kills its process on others, by the tokens."""
    kind = sum(token_ids) % 16
    if kind == 0:
        time.sleep(600)
    if kind == 1:
        os._exit(1)
    return float(len(response))
