"""The embedded task: addition of two two-digit numbers, ``37+58=`` -> ``95``.

Small enough to be learned on two CPU cores within a minute, and with a real flaw to cure: the demonstrations
the embedded model is trained on come from two sources, one of which forgets to carry.
"""

from __future__ import annotations

import zlib
from typing import Any

OPERANDS = range(10, 100)
HELD_OUT_SHARE = 10  # one unordered pair in so many is kept for validation


def is_held_out(a: int, b: int) -> bool:
    """Whether a+b is a validation problem: a property of the pair, the same for a+b and b+a."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % HELD_OUT_SHARE == 0


def problems(*, held_out: bool) -> list[tuple[int, int]]:
    """All pairs of operands of one side of the split, in numerical order."""
    return [(a, b) for a in OPERANDS for b in OPERANDS if is_held_out(a, b) == held_out]


def add_without_carry(a: int, b: int) -> str:
    """The answer of someone who adds column by column and forgets every carry.

    >>> add_without_carry(37, 58), add_without_carry(72, 36)
    ('85', '08')
    """
    return "".join(str((int(x) + int(y)) % 10) for x, y in zip(str(a), str(b), strict=True))


def add(a: int, b: int) -> str:
    """The right answer."""
    return str(a + b)


def row(a: int, b: int) -> dict[str, Any]:
    """The problem as a data row.

    >>> row(37, 58)
    {'prompt': '37+58=', 'answer': '95'}
    """
    return {"prompt": f"{a}+{b}=", "answer": add(a, b)}
