"""A reward function in pure Python that takes its time and holds the interpreter lock."""

from __future__ import annotations

import time
from typing import Any


def spin(prompt: str, response: str, answer: Any, *, seconds: float) -> float:
    """1, after ``seconds`` of processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return 1.0
