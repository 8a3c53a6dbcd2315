"""Which arms are run, how often, and how long that will take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridengine.compare.arms import Arm, candidates
from hybridengine.compare.fit import why_not
from hybridengine.compare.forecast import scenario_of
from hybridengine.config.schema import ConfigError
from hybridengine.simulate.calibrate import Run
from hybridengine.simulate.schedules import simulate
from hybridengine.tools.machine import Machine

#: Fewer counted steps than these tell too little.
MIN_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asks for.

    Attributes:
        job: arguments of hybridengine.train.
        arms: names; empty: all that make sense.
        steps: counted ones of each run; warmup: those before.
        minutes: budget of all runs together.
        out: directory of everything that is written.

    Raises:
        ValueError: by option, value and what would be right.
    """

    job: tuple[str, ...]
    ranks: int
    steps: int = 8
    warmup: int = 2
    rounds: int = 2
    minutes: float = 15.0
    arms: tuple[str, ...] = ()
    out: Path
    config_dirs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("steps", MIN_STEPS), ("warmup", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: must be {least} or more")
        if not self.minutes > 0:
            raise ValueError(f"--minutes {self.minutes:g}: must be greater than 0")

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps

    def identity(self) -> dict[str, object]:
        """What must not change when a comparison goes on; rounds, minutes and arms may."""
        return {"job": list(self.job), "ranks": self.ranks, "steps": self.steps, "warmup": self.warmup}


@dataclass(slots=True, kw_only=True)
class Plan:
    """Arms to run in order of importance, and those left out with their reasons."""

    arms: list[Arm]
    left_out: dict[str, str] = field(default_factory=dict)


def make_plan(settings: Settings, machine: Machine, *, tp: int, method: str = "auto") -> Plan:
    """Arms that make sense here, without those that can't run.

    Args:
        tp: the user's rollout.tp.
        method: the user's sync.method.

    Raises:
        ValueError: a name of ``settings.arms`` that is no arm.
        ConfigError: none can run, and why.
    """
    named = [Arm.parse(name, ranks=settings.ranks) for name in settings.arms]
    wanted = list(dict.fromkeys(named)) or candidates(settings.ranks, tp=tp)
    plan = Plan(arms=[])
    for arm in wanted:
        reason = why_not(arm, settings.job, machine, method=method, config_dirs=settings.config_dirs)
        if reason is None:
            plan.arms.append(arm)
        else:
            plan.left_out[arm.name] = reason
    if not plan.arms:
        raise ConfigError(_why_none(plan.left_out))
    return plan


def _why_none(left_out: Mapping[str, str]) -> str:
    """What is wrong in every arm is the job's own mistake, and said once; else each arm has its own reason."""
    first, *others = [reason.splitlines() for reason in left_out.values()]
    common = [line for line in first if all(line in lines for lines in others)]
    return "\n".join(common or [f"{name}: {reason}" for name, reason in left_out.items()])


def estimate(
    arm: Arm, seconds: Mapping[str, Sequence[float]], pilot: tuple[str, Run] | None, *, steps: int
) -> float | None:
    """Seconds of one run of the arm.

    What its earlier runs took; without one, what the pilot took beyond its steps (start, end) and the arm's own steps,
    simulated with the pilot's costs. None before anything has run.

    Args:
        seconds: of the runs that have ended, by arm.
        pilot: an arm that has run, and what it measured.
        steps: of one run, warm-up included.
    """
    if own := seconds.get(arm.name):
        return sum(own) / len(own)
    if pilot is None:
        return None
    name, run = pilot
    around = max(0.0, min(seconds[name]) - steps * run.seconds_per_step)
    outcome = simulate(scenario_of(arm, run.scenario), run.costs)
    return around + steps * outcome.step_seconds


def within_budget(
    arms: Sequence[Arm], expected: Callable[[Arm], float], *, rounds: int, seconds: float, spent: Mapping[str, float]
) -> tuple[list[Arm], int]:
    """The first arms for which there is time, and the rounds there is time for.

    As many rounds as asked for, of as many arms as that allows, but of two at least; then fewer rounds.

    Args:
        expected: seconds of one run of an arm.
        seconds: the whole budget.
        spent: seconds that arms have had already; they count as part of it.
    """
    for number in range(rounds, 0, -1):
        kept, needed = list[Arm](), 0.0
        for arm in arms:
            needed += max(spent.get(arm.name, 0.0), number * expected(arm))
            if needed > seconds:
                break
            kept.append(arm)
        if len(kept) >= min(2, len(arms)):
            return kept, number
    return list(arms[:2]), 1
