"""What a comparison says: one row per arm, the verdict, forecasts; as JSON, as a sentence, as tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from rich.table import Table

from hybridengine.compare.arms import IN_ORDER, Arm
from hybridengine.compare.forecast import Forecast, SimulatorError, errors, forecasts
from hybridengine.compare.measured import Measured
from hybridengine.compare.verdict import AS_GOOD, RESAMPLES, Verdict, judge, tokens_per_second

Rounds = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm over all its rounds: sums and ratios of sums; memory and shares are medians over rounds.

    Attributes:
        idle: share of its time in which each pool waits; idle_share: over all ranks.
        tokens: trained on, per round.
        staleness_mean, staleness_max: training steps between a sample's first policy and its training.
        reward_equal_time: mean reward of the last steps that ended within the time of the fastest arm.
        shorter: response length over that of the synchronous arms, where it is shorter; else None.
        simulator_error, from_sync: see SimulatorError.
    """

    name: str
    rounds: int
    tokens_per_second: float
    samples_per_second: float
    seconds_per_step: float
    seconds_per_phase: dict[str, float]
    idle: dict[str, float]
    idle_share: float
    sync_share: float
    host_gib: float
    device_gib: float
    staleness_mean: float
    staleness_max: float
    dropped_groups: float
    response_length: float
    tokens: float
    reward_last: float | None
    reward_equal_time: float | None
    shorter: float | None
    simulator_error: float
    from_sync: float | None
    off_policy: bool
    load_average: list[float]


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that is known after a comparison.

    Attributes:
        rows: in order of tokens per second, the best first.
        override_lines: arm -> what to add to the job to train that way.
        last: the last run of each arm, for its picture.
        conditions: machine, versions, commit.
    """

    rows: list[Row]
    verdict: Verdict
    forecasts: list[Forecast]
    override_lines: dict[str, str]
    left_out: dict[str, str]
    failed: dict[str, str]
    last: list[Measured]
    conditions: dict[str, Any] = field(default_factory=dict)

    @property
    def simulator_error_max(self) -> float:
        """Of all arms, with their own costs."""
        return max(abs(row.simulator_error) for row in self.rows)

    @property
    def from_sync_max(self) -> float | None:
        return max((abs(row.from_sync) for row in self.rows if row.from_sync is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object; NaN and infinity become null."""
        verdict = self.verdict
        found = {
            "winner": verdict.winner,
            "margin": verdict.margin,
            "margin_interval": verdict.interval,
            "confidence": verdict.confidence,
            "fastest": verdict.fastest,
            "tied": list(verdict.tied),
            "train_with": self.override_lines[verdict.winner],
            "sentence": sentence(self),
            "effects": [asdict(effect) | {"beyond_noise": effect.beyond_noise} for effect in verdict.effects],
            "arms": [asdict(row) for row in self.rows],
            "simulator_error_max": self.simulator_error_max,
            "simulator_error_from_sync_max": self.from_sync_max,
            "forecasts": [asdict(one) for one in self.forecasts],
            "left_out": self.left_out,
            "failed": self.failed,
            **self.conditions,
        }
        finite = _finite(found)
        assert isinstance(finite, dict)
        return finite


def make_report(
    arms: Mapping[str, Arm],
    rounds: Rounds,
    *,
    left_out: Mapping[str, str] = {},
    failed: Mapping[str, str] = {},
    method: str = "auto",
    conditions: Mapping[str, Any] = {},
) -> Report:
    """From the measured runs.

    Raises:
        ValueError: no arm was measured.
    """
    verdict = judge(arms, rounds)
    off = errors(arms, rounds)
    equal = min(one.seconds for found in rounds.values() for one in found)
    rows = [make_row(arms[name], found, off[name], verdict, equal_seconds=equal) for name, found in rounds.items()]
    return Report(
        rows=sorted(rows, key=lambda row: -row.tokens_per_second), verdict=verdict,
        forecasts=forecasts(arms, rounds, winner=verdict.winner),
        override_lines={name: shlex.join(arms[name].overrides(method=method)) for name in rounds},
        left_out=dict(left_out), failed=dict(failed), last=[found[-1] for found in rounds.values()],
        conditions=dict(conditions),
    )  # fmt: skip


def make_row(
    arm: Arm, found: Sequence[Measured], off: SimulatorError, verdict: Verdict, *, equal_seconds: float
) -> Row:
    """Of one arm. ``equal_seconds``: counted time of the shortest of all runs."""
    seconds = sum(one.seconds for one in found)
    steps = [step for one in found for step in one.steps]
    equal = [reward for one in found if (reward := one.reward_until(equal_seconds)) is not None]
    last = [reward for one in found if (reward := one.reward_until(math.inf)) is not None]
    return Row(
        name=arm.name, rounds=len(found), tokens_per_second=tokens_per_second(found),
        samples_per_second=sum(step.samples for step in steps) / seconds, seconds_per_step=seconds / len(steps),
        seconds_per_phase={
            phase: median(one.seconds_per_phase.get(phase, 0.0) for one in found)
            for phase in found[0].seconds_per_phase
        },
        idle={pool: median(one.idle[pool] for one in found) for pool in found[0].idle},
        idle_share=median(one.idle_share for one in found), sync_share=median(one.sync_share for one in found),
        host_gib=max(one.host_gib for one in found), device_gib=max(one.device_gib for one in found),
        staleness_mean=fmean(one.staleness[0] for one in found), staleness_max=max(one.staleness[1] for one in found),
        dropped_groups=fmean(one.dropped_groups for one in found),
        response_length=fmean(step.response_length for step in steps), tokens=fmean(one.tokens for one in found),
        reward_last=fmean(last) if last else None, reward_equal_time=fmean(equal) if equal else None,
        shorter=verdict.shorter.get(arm.name), simulator_error=off.own, from_sync=off.from_sync,
        off_policy=arm.off_policy, load_average=[one.load_average for one in found],
    )  # fmt: skip


# -- in words --------------------------------------------------------------------------------------


def sentence(report: Report) -> str:
    """Which arm to train with, why, and how sure that is."""
    verdict = report.verdict
    winner = next(row for row in report.rows if row.name == verdict.winner)
    others = [name for name in verdict.tied if name != winner.name]
    text = f"Train with {winner.name}: {winner.tokens_per_second:,.0f} tokens/s"
    if others:
        text += f"; no difference beyond noise to {_listed(others)}"
    if verdict.margin is not None and verdict.interval is not None:
        second = next(row for row in report.rows if row.name not in verdict.tied)
        low, high = verdict.interval
        text += f"; {verdict.margin:.2f}× {second.name} (95 %: {low:.2f} to {high:.2f}), {_why(winner, second)}"
    if len(report.rows) == 1:
        return f"{text}. No other arm ran."
    text += (
        f". It is the fastest, or within {1 - AS_GOOD:.0%} of it, in {verdict.confidence:.0%} of {RESAMPLES} resamples."
    )
    if others:
        text += " More --rounds would tell them apart, if there is a difference."
    if winner.shorter is not None:
        text += f" Its responses are {winner.shorter:.0%} as long as the synchronous arms': it trains on other work."
    return text


def _why(winner: Row, second: Row) -> str:
    """What makes the difference: idle time where that explains it, else the phase that differs most."""
    if second.idle_share - winner.idle_share > 0.05:
        return f"whose ranks wait {second.idle_share:.0%} of the time, the winner's {winner.idle_share:.0%}"
    phases = winner.seconds_per_phase.keys() | second.seconds_per_phase.keys()

    def saved(phase: str) -> float:
        return second.seconds_per_phase.get(phase, 0.0) - winner.seconds_per_phase.get(phase, 0.0)

    most = max(sorted(phases), key=saved)
    if saved(most) <= 0:
        return f"with {winner.tokens / second.tokens:.2f}× the tokens per step"
    ours, theirs = winner.seconds_per_phase.get(most, 0.0), second.seconds_per_phase[most]
    return f"whose {most} takes {theirs:.3g} s of a step, the winner's {ours:.3g} s"


def notes(report: Report) -> list[str]:
    """What to know beside the table."""
    found = [f"effect of {effect}" for effect in report.verdict.effects]
    for name, share in report.verdict.shorter.items():
        remedy = "; schedule.order=start takes groups in order of admission" if is_overtaking(name) else ""
        found.append(f"{name} trains on other work: responses {share:.0%} as long as the synchronous arms'{remedy}")
    most, least = max(row.tokens for row in report.rows), min(row.tokens for row in report.rows)
    if most > 1.02 * least:
        found.append(
            f"tokens trained on per round differ by up to {most / least - 1:.0%}: equal samples, other lengths"
        )
    return found


def is_overtaking(name: str) -> bool:
    """Whether short answers overtake long ones in this arm."""
    return "-async" in name and IN_ORDER not in name


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- tables ----------------------------------------------------------------------------------------

HEADS = ("arm", "tokens/s", "", "samples/s", "s/step", "idle", "sync", "GiB", "stale", "length", "reward",
         "at equal time", "simulated", "from sync")  # fmt: skip


def cells(row: Row, best: float) -> list[str]:
    """A row of the table, as texts."""

    def reward(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    return [
        row.name,
        f"{row.tokens_per_second:,.0f}",
        f"{row.tokens_per_second / best:.2f}×",
        f"{row.samples_per_second:,.0f}" if row.samples_per_second >= 100 else f"{row.samples_per_second:.3g}",
        f"{row.seconds_per_step:.3g}",
        ", ".join(f"{pool} {share:.0%}" for pool, share in row.idle.items()),
        f"{row.sync_share:.1%}",
        f"{row.device_gib or row.host_gib:.2f}",
        f"{row.staleness_mean:.1f}, ≤ {row.staleness_max:.0f}",
        f"{row.response_length:.1f}" + (" (shorter)" if row.shorter is not None else ""),
        reward(row.reward_last),
        reward(row.reward_equal_time),
        f"{row.simulator_error:+.1%}",
        "" if row.from_sync is None else f"{row.from_sync:+.1%}",
    ]


def table(report: Report) -> Table:
    """For the terminal."""
    found = Table(title="arms, best first; warm-up left out, all rounds together", title_justify="left")
    for head in HEADS:
        found.add_column(head, justify="left" if head in ("arm", "idle") else "right", no_wrap=head == "arm")
    for row in report.rows:
        found.add_row(*cells(row, report.rows[0].tokens_per_second))
    return found


def phase_names(report: Report) -> list[str]:
    """Phases that take more than a hundredth of a step somewhere, the longest first."""
    longest: dict[str, float] = {}
    for row in report.rows:
        for phase, seconds in row.seconds_per_phase.items():
            if seconds > 0.01 * row.seconds_per_step:
                longest[phase] = max(longest.get(phase, 0.0), seconds)
    return sorted(longest, key=lambda phase: -longest[phase])


def phase_table(report: Report) -> Table:
    """Seconds per step of the first rank's phases."""
    names = phase_names(report)
    found = Table(title="seconds per step, by phase of the training ranks", title_justify="left")
    for head in ("arm", *names):
        found.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for row in report.rows:
        found.add_row(row.name, *(f"{row.seconds_per_phase.get(name, 0.0):.3g}" for name in names))
    return found


def forecast_table(report: Report) -> Table:
    """What the simulator says of arms that were not run."""
    error = report.from_sync_max or report.simulator_error_max
    found = Table(
        title=f"simulated, not run; off by up to {error:.0%} on the measured arms", title_justify="left"
    )  # fmt: skip
    for head in ("question", "arm", "s/step", "tokens/s", "over the winner there", "length"):
        found.add_column(head, justify="left" if head in ("question", "arm") else "right")
    for one in report.forecasts:
        found.add_row(
            one.question, one.arm, f"{one.seconds_per_step:.3g}", f"{one.tokens_per_second:,.0f}", f"{one.ratio:.2f}×",
            f"{one.response_length:.0f}",
        )  # fmt: skip
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
