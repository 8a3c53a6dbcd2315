"""A configuration key: a dataclass field with its default, its one-line explanation and the values that it takes."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

from hybridengine.config.limits import Limits


def key(default: Any, help: str, **limits: Any) -> Any:
    """A field with its default, its explanation and the values that it takes (the arguments of :class:`Limits`).

    ``choices`` is a list of names, or a dictionary from each name to what it means.
    """
    if (choices := limits.get("choices")) is not None and not isinstance(choices, dict):
        limits["choices"] = dict.fromkeys(choices, "")
    metadata = {"help": help, "limits": Limits(**limits)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def limits_of(item: dataclasses.Field[Any]) -> Limits:
    """The values that a key takes."""
    limits = item.metadata["limits"]
    assert isinstance(limits, Limits)
    return limits


def explanation(item: dataclasses.Field[Any]) -> str:
    """What a key does, and the values that it takes: a line of ``--help``."""
    help, limits = item.metadata["help"], limits_of(item)
    if not str(limits):
        return str(help)
    return f"{help}: {limits}" if limits.choices else f"{help} ({limits})"


def as_texts(value: str | list[str]) -> tuple[str, ...]:
    """The value of a key that takes a text or a list of texts."""
    return (value,) if isinstance(value, str) else tuple(value)


def text_of(value: Any) -> str:
    """A value as it is written on the command line, without quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
