"""Which values a configuration key takes: stated once beside the key, read by validation, ``--help`` and the docs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Choices or a range. A comparison with NaN is false, so bounds are written as what must hold.

    >>> Limits(gt=0, le=1).problem(1.5)
    'must be in (0, 1]'
    >>> str(Limits(choices={"drop": "", "truncate": "keeps the end"}))
    'drop | truncate (keeps the end)'

    Attributes:
        choices: the values that are allowed, each with what it means ("" where its name says it); empty: any.
        unlisted: values that pass here, and are refused later with a reason of their own.
        gt, ge, lt, le: bounds of a number.
        finite: NaN and infinity are refused, inside of dictionaries too.
        texts: a text, or a list of texts; for keys of type Any.
    """

    choices: Mapping[Any, str] = field(default_factory=dict)
    unlisted: tuple[Any, ...] = ()
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    finite: bool = True
    texts: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``, or None."""
        if value is None:
            return None
        if self.texts and not all(isinstance(text, str) and text for text in _listed(value)):
            return "must be a text, or a list of texts in brackets"
        if self.choices:
            allowed = value in self.choices or value in self.unlisted
            return None if allowed else f"must be one of {' | '.join(map(str, self.choices))}"
        if isinstance(value, (int, float)) and not self._in_range(value):
            return f"must be {self._range_in_words()}"
        if self.finite and any(not math.isfinite(number) for number in _numbers(value)):
            return "must be a finite number" if isinstance(value, float) else "must hold finite numbers only"
        return None

    def _in_range(self, value: float) -> bool:
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def _range_in_words(self) -> str:
        if self.lt is None and self.le is None:
            return f"greater than {self.gt:g}" if self.gt is not None else f"{self.ge:g} or more"
        return self._interval()

    def _interval(self) -> str:
        low = f"({self.gt:g}" if self.gt is not None else f"[{self.ge:g}" if self.ge is not None else "(-inf"
        high = f"{self.lt:g})" if self.lt is not None else f"{self.le:g}]"
        return f"in {low}, {high}"

    def __str__(self) -> str:
        """As ``--help`` shows it; empty where every value of the type is allowed."""
        if self.choices:
            return " | ".join(f"{name} ({text})" if text else f"{name}" for name, text in self.choices.items())
        if (self.gt, self.ge, self.lt, self.le) == (None, None, None, None):
            return ""
        if self.lt is None and self.le is None:
            return f"> {self.gt:g}" if self.gt is not None else f">= {self.ge:g}"
        return self._interval()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbers(value: Any) -> Iterator[float]:
    """Every float in ``value``, through dictionaries and lists."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner)
