"""Values that come out of the sandbox, as plain built-in objects: their comparisons are Python's own."""

from __future__ import annotations

import json
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any


class Opaque:
    """A value of a type that does not leave the sandbox; equal to nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.name}>"


def decode(content: bytes) -> Any:
    """The JSON of a reply.

    Raises:
        ValueError: it is none, or is nested too deep.
    """
    try:
        return json.loads(content)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"a reply that can't be read: {error}") from None


def value_of(node: Any) -> Any:
    """The value that harness.encode wrote down.

    >>> value_of({"t": [1, {"d": [["a", 2.5]]}]})
    (1, {'a': 2.5})

    Raises:
        ValueError: nothing that encode writes.
    """
    try:
        return _value(node)
    except (RecursionError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"a value that can't be read: {error}") from None


def _value(node: Any) -> Any:
    if isinstance(node, list):
        return [_value(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag == "d":
        return {_value(key): _value(item) for key, item in body}
    sequences: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset, "q": deque}
    if tag in sequences:
        return sequences[tag](_value(item) for item in body)
    if tag == "n":
        return {"Decimal": Decimal, "Fraction": Fraction}[body[0]](body[1])
    simple: dict[str, Any] = {
        "i": lambda text: int(text, 16),
        "f": float,
        "b": bytes.fromhex,
        "a": bytearray.fromhex,
        "c": lambda parts: complex(_value(parts[0]), _value(parts[1])),
        "r": lambda bounds: range(*bounds),
        "o": Opaque,
    }
    return simple[tag](body)
