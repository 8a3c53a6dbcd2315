"""Alarm rules: a metric, a bound, and for how many steps in a row it must be crossed.

<metric> <operator> <number> [* start] [for <steps>]

completions/clipped_ratio > 0.5 for 3
completions/mean_length > 2 * start for 3      start: the metric's mean over the first steps of the run
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RULE = re.compile(
    r"\s*(?P<metric>[\w/.\-]+)\s*(?P<operator>>=|<=|>|<)\s*(?P<bound>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*"
    r"(?P<relative>\*\s*start)?\s*(?:for\s+(?P<steps>\d+))?\s*"
)
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
#: Steps whose mean is ``start``.
START_STEPS = 5


@dataclass(slots=True, kw_only=True)
class Rule:
    """One rule and its state.

    Attributes:
        advice: the usual cause, for the message.
        stops: its alarm ends the run, whatever ``monitor.action`` says.
    """

    name: str
    metric: str
    operator: str
    bound: float
    relative: bool = False
    steps: int = 1
    advice: str = ""
    stops: bool = False
    _streak: int = 0
    _first: list[float] = field(default_factory=list)

    @classmethod
    def parse(cls, name: str, text: str, *, advice: str = "") -> Rule:
        """Read a rule such as ``loss > 10 for 3``. Raises ValueError for any other text."""
        match = RULE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"monitor.rules.{name}={text!r}: no rule; write '<metric> > <number> for <steps>', or "
                "'<metric> < <number> * start for <steps>'"
            )
        try:
            bound, steps = float(match["bound"]), int(match["steps"] or 1)
        except ValueError:
            raise ValueError(f"monitor.rules.{name}={text!r}: {match['bound']!r} is no number") from None
        if steps < 1:
            raise ValueError(f"monitor.rules.{name}={text!r}: for {steps}: must be 1 or more steps")
        return cls(
            name=name, metric=match["metric"], operator=match["operator"], bound=bound,
            relative=match["relative"] is not None, steps=steps, advice=advice,
        )  # fmt: skip

    @property
    def crossed(self) -> bool:
        """Whether the bound has been crossed for as many steps as it takes."""
        return self._streak >= self.steps

    def see(self, record: Mapping[str, float]) -> str | None:
        """Check one step's metrics. Returns the alarm's message in the step in which the alarm begins, else None.

        A step without the metric is skipped. NaN crosses every bound.
        """
        value = record.get(self.metric)
        if value is None:
            return None
        if self.relative and len(self._first) < START_STEPS:
            self._first.append(value)
            return None
        bound = self.bound * (sum(self._first) / len(self._first) if self.relative else 1.0)
        over = math.isnan(value) or OPERATORS[self.operator](value, bound)
        self._streak = self._streak + 1 if over else 0
        if self._streak != self.steps:
            return None
        relative = f" ({self.bound:g} times what it was at the start)" if self.relative else ""
        times = f" for {self.steps} steps" if self.steps > 1 else ""
        text = f"{self.metric} is {value:.4g}, {self.operator} {bound:.4g}{relative}{times}"
        return f"{text}. {self.advice}" if self.advice else text


@dataclass(slots=True, kw_only=True)
class Diverging:
    """Training reward rises while the held-out one falls, from validation to validation, ``times`` in a row."""

    name: str = "held_out"
    times: int = 3
    advice: str = "The reward is no longer what held-out prompts measure: look at responses with a high reward"
    _rewards: list[float] = field(default_factory=list)  # since the last validation
    _training: list[float] = field(default_factory=list)  # one mean per validation
    _held_out: list[float] = field(default_factory=list)
    _streak: int = 0

    @property
    def crossed(self) -> bool:
        return self._streak >= self.times

    def see(self, record: Mapping[str, float]) -> str | None:
        """As Rule.see."""
        if "reward" in record:
            self._rewards.append(record["reward"])
        if "validation/reward" not in record or not self._rewards:
            return None
        self._training.append(sum(self._rewards) / len(self._rewards))
        self._held_out.append(record["validation/reward"])
        self._rewards = []
        if len(self._training) < 2:
            return None
        diverges = self._training[-1] > self._training[-2] and self._held_out[-1] < self._held_out[-2]
        self._streak = self._streak + 1 if diverges else 0
        if self._streak != self.times:
            return None
        ours, theirs = self._training[-self.times - 1 :], self._held_out[-self.times - 1 :]
        return (
            f"the reward rose from {ours[0]:.4g} to {ours[-1]:.4g} in training and fell from {theirs[0]:.4g} to "
            f"{theirs[-1]:.4g} on held-out prompts, over {self.times} validations. {self.advice}"
        )
