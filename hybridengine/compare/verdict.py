"""Which arm is fastest, and how sure that is: a bootstrap over rounds and steps.

The figure of an arm is the ratio of sums: tokens trained on over seconds of training steps, all rounds together. One
resample draws rounds with replacement and, within each, steps with replacement; step s of round r is drawn for every
arm or for none, because all arms meet the same prompts in the same step, and the same machine in the same round (a
paired bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 8). Steps of arms that ran in
fewer rounds are drawn from the rounds that they have.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hybridengine.compare.arms import Arm
from hybridengine.compare.measured import Measured

RESAMPLES = 2000
#: Share of the resamples in which an arm must be ahead to be called faster.
CONFIDENCE = 0.95
#: An arm this close to the fastest is as good, where noise hides the difference.
AS_GOOD = 0.95
#: Response length below this share of the synchronous arms' means other work.
SHORTER = 0.9

Rounds = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One thing changed and everything else the same.

    Attributes:
        what: "placement", "schedule" or "rollout.tp".
        ratio: tokens/s of ``faster`` over those of ``slower``.
        interval: of the ratio, at CONFIDENCE.
    """

    what: str
    faster: str
    slower: str
    ratio: float
    interval: tuple[float, float]

    @property
    def beyond_noise(self) -> bool:
        return self.interval[0] > 1.0

    def __str__(self) -> str:
        low, high = self.interval
        text = f"{self.what}: {self.faster} {self.ratio:.2f}× {self.slower} ({low:.2f} to {high:.2f})"
        return text if self.beyond_noise else f"{text}, no difference beyond noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the comparison says.

    Attributes:
        winner: the fastest arm; where others are tied with it and reach AS_GOOD of it, the simplest of them.
        fastest: by tokens per second, whatever the noise.
        tied: arms that are not slower than the fastest beyond noise, the winner among them.
        margin: tokens/s of the winner over those of the fastest arm that is not tied; None where all are.
        interval: of the margin, at CONFIDENCE.
        confidence: share of the resamples in which the winner reaches AS_GOOD of the fastest arm there.
        effects: placement, schedule and tensor parallelism, each alone.
        shorter: arm -> its response length over that of the synchronous arms, where it is below SHORTER.
    """

    winner: str
    fastest: str
    tied: tuple[str, ...]
    margin: float | None
    interval: tuple[float, float] | None
    confidence: float
    effects: tuple[Effect, ...]
    shorter: dict[str, float]


def tokens_per_second(found: Sequence[Measured]) -> float:
    """Of an arm, over all its rounds."""
    return sum(one.tokens for one in found) / sum(one.seconds for one in found)


def resampled(rounds: Rounds, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, list[float]]:
    """Tokens per second of every arm in every resample, the same draws for all arms.

    Raises:
        ValueError: no arm, or one without a step.
    """
    if not rounds or not all(found and all(one.steps for one in found) for found in rounds.values()):
        raise ValueError("a comparison needs at least one arm, and a counted step of each")
    generator = random.Random(seed)
    number = max(len(found) for found in rounds.values())
    length = max(len(one.steps) for found in rounds.values() for one in found)
    rates: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(resamples):
        drawn = [
            (generator.randrange(number), [generator.randrange(length) for _ in range(length)]) for _ in range(number)
        ]
        for name, found in rounds.items():
            tokens = seconds = 0.0
            for round_, steps in drawn:
                one = found[round_ % len(found)].steps
                for step in steps:
                    chosen = one[step % len(one)]
                    tokens += chosen.tokens
                    seconds += chosen.seconds
            rates[name].append(tokens / seconds)
    return rates


def judge(arms: Mapping[str, Arm], rounds: Rounds, *, resamples: int = RESAMPLES, seed: int = 0) -> Verdict:
    """The verdict on these runs.

    Args:
        arms: by name, at least those of ``rounds``.
        rounds: the runs of each arm.
        seed: of the resampling; the same runs have the same verdict.

    Raises:
        ValueError: see resampled.
    """
    rates = resampled(rounds, resamples=resamples, seed=seed)
    means = {name: tokens_per_second(found) for name, found in rounds.items()}
    order = sorted(means, key=lambda name: -means[name])
    fastest = order[0]
    tied = tuple(name for name in order if name == fastest or not _beats(rates[fastest], rates[name]))
    as_good = [name for name in tied if means[name] >= AS_GOOD * means[fastest]]
    winner = min(as_good, key=lambda name: (*_simplicity(arms[name]), order.index(name)))
    rest = [name for name in order if name not in tied]
    ratios = [a / b for a, b in zip(rates[winner], rates[rest[0]], strict=True)] if rest else []
    reached = sum(rate >= AS_GOOD * max(others) for rate, *others in zip(rates[winner], *rates.values(), strict=True))
    return Verdict(
        winner=winner, fastest=fastest, tied=tied,
        margin=means[winner] / means[rest[0]] if rest else None, interval=_interval(ratios) if rest else None,
        confidence=reached / resamples,
        effects=tuple(effects(arms, means, rates)), shorter=shorter(arms, rounds),
    )  # fmt: skip


def effects(arms: Mapping[str, Arm], means: Mapping[str, float], rates: Mapping[str, Sequence[float]]) -> list[Effect]:
    """Every pair of arms that differ in one thing alone, against the plainest of the two kinds.

    Placement: both ``sync`` with the same ``rollout.tp``. Schedule: against ``sync`` on the same ranks. Tensor
    parallelism: against the smallest one of the same placement and schedule.
    """
    found = []
    for name in means:
        arm = arms[name]
        for base in means:
            other = arms[base]
            if what := difference(arm, other):
                pair = (name, base) if means[name] >= means[base] else (base, name)
                ratios = [a / b for a, b in zip(rates[pair[0]], rates[pair[1]], strict=True)]
                found.append(
                    Effect(
                        what=what,
                        faster=pair[0],
                        slower=pair[1],
                        ratio=means[pair[0]] / means[pair[1]],
                        interval=_interval(ratios),
                    )  # fmt: skip
                )
    order = ("placement", "schedule", "rollout.tp", "work stealing")
    return sorted(found, key=lambda effect: (order.index(effect.what), -effect.ratio))


def difference(arm: Arm, base: Arm) -> str | None:
    """What alone sets ``arm`` apart from the plainer ``base``; None where it is nothing, or more than one thing."""
    placement = arm.rollout_ranks != base.rollout_ranks
    schedule, tp = arm.schedule != base.schedule, arm.tp != base.tp
    stealing = arm.stealing != base.stealing
    if [placement, schedule, tp, stealing].count(True) != 1:
        return None
    if placement:
        return "placement" if arm.schedule == "sync" and not base.rollout_ranks else None
    if schedule:
        return "schedule" if base.schedule == "sync" else None
    if stealing:
        return "work stealing" if base.stealing else None
    return "rollout.tp" if base.tp < arm.tp else None


def shorter(arms: Mapping[str, Arm], rounds: Rounds) -> dict[str, float]:
    """Arms that train on shorter responses than the synchronous ones do; without such an arm, than the median."""
    lengths = {name: fmean(one.response_length for one in found) for name, found in rounds.items()}
    plain = [length for name, length in lengths.items() if not arms[name].off_policy] or [median(lengths.values())]
    usual = fmean(plain)
    return {name: length / usual for name, length in lengths.items() if length < SHORTER * usual}


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return sum(a > b for a, b in zip(one, other, strict=True)) >= CONFIDENCE * len(one)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Percentiles that leave (1 - CONFIDENCE) / 2 on either side."""
    ordered, tail = sorted(values), (1 - CONFIDENCE) / 2
    return ordered[int(tail * len(ordered))], ordered[min(len(ordered) - 1, int((1 - tail) * len(ordered)))]


def _simplicity(arm: Arm) -> tuple[int, int, int]:
    """Smaller is simpler: on-policy, one pool, small replicas."""
    from hybridengine.compare.arms import ARM_SCHEDULES

    return ARM_SCHEDULES.index(arm.schedule), int(arm.rollout_ranks > 0), arm.tp
