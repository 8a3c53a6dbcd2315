"""Response lengths: functions of (prompt, sample), so that every arm meets the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from hybridengine.engines.rollout.seeds import sample_seed

FORMS = "fixed:N, lognormal:mean=M,p99=Q[,cap=C][,within=W], or measured (with --run)"
_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Lengths(Protocol):
    """Response tokens of a sample, 1 or more."""

    def __call__(self, prompt: int, sample: int) -> int: ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """All alike."""

    tokens: int

    def __call__(self, prompt: int, sample: int) -> int:
        return self.tokens

    def describe(self) -> str:
        return f"every response has {self.tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Long-tailed.

    Attributes:
        mean, p99: mean and 99th percentile, before the cap.
        cap: longest response (rollout.max_tokens); 0: none.
        within: share of the variance of log-length that lies between the samples of one prompt; the rest lies between
            prompts.
        seed: of the draw.

    Raises:
        ValueError: no lognormal distribution has that mean and 99th percentile.
    """

    mean: float
    p99: float
    cap: int = 0
    within: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mean <= 0 or not 0 <= self.within <= 1 or self.cap < 0:
            raise ValueError(
                f"lognormal:mean={self.mean},cap={self.cap},within={self.within}: mean > 0, within in 0..1"
            )
        limit = math.exp(_Z99**2 / 2)
        if not 1 < self.p99 / self.mean <= limit:
            raise ValueError(
                f"lognormal:mean={self.mean:g},p99={self.p99:g}: p99 must be more than the mean and at most "
                f"{limit:.1f} times the mean"
            )

    @property
    def sigma(self) -> float:
        """ln p99 = mu + z·sigma and ln mean = mu + sigma²/2, the smaller of the two solutions."""
        return _Z99 - math.sqrt(_Z99**2 - 2 * math.log(self.p99 / self.mean))

    def __call__(self, prompt: int, sample: int) -> int:
        z = math.sqrt(1 - self.within) * _normal(self.seed, prompt, -1)
        z += math.sqrt(self.within) * _normal(self.seed, prompt, sample)
        tokens = max(1, round(math.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * z)))
        return min(tokens, self.cap) if self.cap else tokens

    def describe(self) -> str:
        cap = f", cut at {self.cap}" if self.cap else ""
        return (
            f"lognormal response lengths, mean {self.mean:g}, 99th percentile {self.p99:g}{cap}; "
            f"{self.within:.0%} of the log-variance between samples of one prompt"
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Others, each ``factor`` times as long."""

    base: Lengths
    factor: float

    def __call__(self, prompt: int, sample: int) -> int:
        return max(1, round(self.factor * self.base(prompt, sample)))

    def describe(self) -> str:
        return f"{self.factor:g} times: {self.base.describe()}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Those of a run: sample -> tokens per prompt. Prompts beyond it are given those of the run, from its start."""

    groups: Mapping[int, Mapping[int, int]]

    def __call__(self, prompt: int, sample: int) -> int:
        group = self.groups.get(prompt)
        if group is None:
            keys = list(self.groups)
            group = self.groups[keys[prompt % len(keys)]]
        if sample in group:
            return group[sample]
        values = list(group.values())
        return values[sample % len(values)]

    def describe(self) -> str:
        values = sorted(tokens for group in self.groups.values() for tokens in group.values())
        mean = sum(values) / len(values)
        p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
        return f"{len(values)} measured response lengths: mean {mean:.1f}, 99th percentile {p99}, longest {values[-1]}"


def parse(text: str) -> Lengths:
    """A distribution from the command line.

    >>> parse("lognormal:mean=2000,p99=12000,cap=8192").describe()[:43]
    'lognormal response lengths, mean 2000, 99th'

    Raises:
        ValueError: with the text, and what would be right.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "fixed" and int(rest) > 0:
            return Fixed(int(rest))
        if kind == "lognormal":
            values = dict(item.split("=") for item in rest.split(","))
            known = {"mean", "p99", "cap", "within", "seed"}
            if {"mean", "p99"} <= values.keys() <= known:
                whole = {name: int(values[name]) for name in ("cap", "seed") if name in values}
                real = {name: float(values[name]) for name in ("mean", "p99", "within") if name in values}
                return Lognormal(**whole, **real)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"--lengths {text}: {error}; give {FORMS}") from None
    raise ValueError(f"--lengths {text}: give {FORMS}")


def _normal(seed: int, prompt: int, sample: int) -> float:
    uniform = (sample_seed(seed, 0, prompt, sample) + 0.5) / 2**63
    return _NORMAL.inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
