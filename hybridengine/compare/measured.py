"""What one run of one arm measured, read from the files that every run leaves."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridengine.schedule.recorder import read_windows
from hybridengine.simulate.calibrate import Run, read_run

#: Phases of the training ranks in which they wait for samples.
WAITING = ("rollout", "drain")
#: Phases that a step may have and a comparison leaves out.
ASIDE = ("validation", "checkpoint")


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One counted training step: seconds without validation and checkpoint, tokens and samples trained on."""

    seconds: float
    tokens: float
    samples: int
    response_length: float
    reward: float


@dataclass(slots=True, kw_only=True)
class Measured:
    """One run, its warm-up left out.

    Attributes:
        run: as the simulator reads it: scenario, costs, lengths, step time.
        steps: the counted steps in order.
        seconds_per_phase: means over steps, the first rank's top-level phases.
        idle: share of its time in which a pool waits, by pool (colocated: "all", waiting for the slowest replica).
        rollout_tokens_per_second: tokens generated over the seconds from a rollout's first engine step to its last.
        staleness: training steps between a sample's first policy and its training: mean, and the largest.
        spans: the first rank's phases; replicas: each replica's stretches of work; seconds since the run began.
    """

    name: str
    run: Run
    steps: list[StepFigures]
    seconds_per_phase: dict[str, float]
    idle: dict[str, float]
    sync_share: float
    rollout_tokens_per_second: float
    host_gib: float
    device_gib: float
    staleness: tuple[float, float]
    dropped_groups: float
    load_average: float
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    replicas: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def idle_share(self) -> float:
        """Over all ranks."""
        scenario = self.run.scenario
        if not scenario.rollout_ranks:
            return self.idle["all"]
        weighed = self.idle["train"] * scenario.train_ranks + self.idle["rollout"] * scenario.rollout_ranks
        return weighed / scenario.ranks

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> float:
        return sum(step.tokens for step in self.steps)

    @property
    def response_length(self) -> float:
        """Mean over the samples trained on."""
        return fmean(step.response_length for step in self.steps)

    def reward_until(self, seconds: float, *, last: int = 3) -> float | None:
        """Mean reward of the last steps that ended by then, counted steps alone; None where none did."""
        clock, known = 0.0, list[float]()
        for step in self.steps:
            clock += step.seconds
            if clock <= seconds + 1e-9:
                known.append(step.reward)
        return fmean(known[-last:]) if known else None


def measure(
    name: str, directory: Path, *, skip: int, host_gib: float = 0.0, device_gib: float = 0.0, load_average: float = 0.0
) -> Measured:
    """Read a finished run.

    Args:
        skip: first steps that are not counted: they compile, and meet cold caches.

    Raises:
        ValueError: a file is missing or has too few steps, by name.
    """
    run = read_run(directory, skip=skip)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    counted = [record for record in records if record["step"] > skip]
    phases: dict[str, float] = defaultdict(float)
    for record in counted:
        for phase, seconds in record.items():
            if phase.startswith("time/") and phase != "time/step":
                phases[phase.split("/")[1]] += seconds / len(counted)
    steps = [_step(record, run.scenario.prompts * run.scenario.samples) for record in counted]
    windows = [replica[skip:] for replica in read_windows(directory)]
    spans, replicas, first = read_trace(directory, skip=skip)
    wall = sum(step.seconds for step in steps)
    sync = phases.get("sync", 0.0) * len(steps) / wall
    return Measured(
        name=name, run=run, steps=steps, seconds_per_phase=dict(sorted(phases.items(), key=lambda item: -item[1])),
        idle=idle_shares(run, windows, replicas, phases, since=first, wall=wall, sync=sync), sync_share=sync,
        rollout_tokens_per_second=rollout_rate(windows), host_gib=host_gib, device_gib=device_gib,
        staleness=(
            fmean(record.get("staleness/mean", 0.0) for record in counted),
            max(record.get("staleness/max", 0.0) for record in counted),
        ),
        dropped_groups=counted[-1].get("staleness/dropped_groups", 0.0), load_average=load_average, spans=spans,
        replicas=replicas,
    )  # fmt: skip


def _step(record: Mapping[str, Any], samples: int) -> StepFigures:
    aside = sum(seconds for name, seconds in record.items() if name.startswith("time/") and name.split("/")[1] in ASIDE)
    return StepFigures(
        seconds=record["time/step"] - aside, tokens=record["perf/tokens"], samples=samples,
        response_length=record["completions/mean_length"], reward=record["reward"],
    )  # fmt: skip


def read_trace(
    directory: Path, *, skip: int
) -> tuple[list[tuple[str, float, float]], list[list[tuple[float, float]]], float]:
    """The first rank's top-level phases, the replicas' stretches of work, and when the first counted step began."""
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    spans, begun = [], []
    replicas: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event["cat"] == "rollout":
            replicas[event["tid"]].append((start, end))
        elif event["tid"] == 0 and "/" not in event["args"]["path"]:
            spans.append((event["args"]["path"], start, end))
            if (event["args"]["step"] or 0) > skip:
                begun.append(start)
    return spans, [replicas[number] for number in sorted(replicas)], min(begun)


def idle_shares(
    run: Run,
    windows: Sequence[Sequence[Mapping[str, Any]]],
    replicas: Sequence[Sequence[tuple[float, float]]],
    phases: Mapping[str, float],
    *,
    since: float,
    wall: float,
    sync: float,
) -> dict[str, float]:
    """See Measured.idle.

    Args:
        since: when the first counted step began, on the clock of ``replicas``.
        wall: seconds of all counted steps.
        sync: share of it that goes into weight syncs.
    """
    count = len(windows)
    if not run.scenario.rollout_ranks:
        waited = 0.0
        for round_ in zip(*windows, strict=False):
            ends = [window["busy"][-1][1] for window in round_]
            waited += sum(max(ends) - end for end in ends) / count
        return {"all": waited / wall}
    busy = sum(max(0.0, min(end, since + wall) - max(start, since)) for found in replicas for start, end in found)
    steps = wall / run.seconds_per_step
    waits = sum(phases.get(phase, 0.0) for phase in WAITING) * steps / wall
    return {"train": waits, "rollout": max(0.0, 1 - busy / count / wall - sync)}


def rollout_rate(windows: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Tokens per second of rollouts, each from its first engine step to its last, over all replicas."""
    tokens = seconds = 0.0
    for round_ in zip(*windows, strict=False):
        seconds += max(w["busy"][-1][1] for w in round_) - min(w["busy"][0][0] for w in round_)
        tokens += sum(
            running * values[0] for w in round_ for kind in ("decode", "prefill") for running, values in w[kind].items()
        )
    return tokens / seconds if seconds else 0.0
