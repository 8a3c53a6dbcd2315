"""Run directories as an arm leaves them, with step times that the test chooses."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridengine.compare.arms import IN_ORDER, Arm
from hybridengine.compare.launch import Result
from hybridengine.compare.measured import Measured, measure
from hybridengine.tracing import Span, write_chrome_trace
from tests.unit.simulate.test_calibrate import write_run

WARMUP = 2


def record(
    directory: Path, arm: Arm, *, steps: int = 8, extra: float = 0.0, noise: float = 0.0, round: int = 0,
    shorter: float = 1.0,
) -> Path:  # fmt: skip
    """write_run's files as this arm's.

    Args:
        extra: seconds on top of each step, in its optimizer phase.
        noise: standard deviation of a step's seconds, drawn anew for each step and round.
        shorter: reported response length over the usual one; tokens follow it.
    """
    schedule = "async" if arm.schedule == IN_ORDER else arm.schedule
    write_run(directory, steps=steps, rollout_ranks=arm.rollout_ranks, schedule=schedule)
    config = json.loads((directory / "config.json").read_text())
    config["rollout"]["tp"] = arm.generating  # one replica, as write_run has it
    config["schedule"]["order"] = "start" if arm.schedule == IN_ORDER else "completion"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "summary.json").write_text(json.dumps({"world_size": arm.train_ranks}))
    generator = random.Random(f"{arm.name} {round}")
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(records[1:], start=1):
        more = extra + generator.gauss(0, noise)
        line["time/optimizer"] += more
        line["time/step"] += more
        responses = 4 * line["completions/mean_length"]
        line["completions/mean_length"] *= shorter
        line["perf/tokens"] += responses * (shorter - 1)
        line |= {"reward": number / 10, "staleness/mean": 0.5, "staleness/max": 1.0, "staleness/dropped_groups": 2.0}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    spans = [Span("rollout", 2.0 * n, 2 * n + 1.0, n + 1) for n in range(steps)]
    spans += [Span("optimizer", 2 * n + 1.5, 2 * n + 2.0, n + 1) for n in range(steps)]
    replicas = [[(2.0 * n, 2 * n + 1.0) for n in range(steps)]]
    write_chrome_trace(directory / "trace.json", spans, replicas=replicas)
    return directory


def measured(directory: Path, name: str, *, ranks: int = 2, rounds: int = 1, **changes: Any) -> list[Measured]:
    """The runs of one arm, ``rounds`` of them."""
    arm = Arm.parse(name, ranks=ranks)
    return [
        measure(name, record(directory / f"{name}-{i}", arm, round=i, **changes), skip=WARMUP, host_gib=1.5)
        for i in range(rounds)
    ]


class Launcher:
    """Stands in for torchrun: records a run, or fails.

    Args:
        extra: arm -> seconds on top of each of its steps.
        fails: arm -> the error of its runs.
        interrupted_at: number of the call that ends with Ctrl-C.
        seconds: that each run reports.
    """

    def __init__(
        self, *, extra: Mapping[str, float] = {}, fails: Mapping[str, str] = {}, interrupted_at: int = -1,
        seconds: float = 10.0,
    ) -> None:  # fmt: skip
        self.extra, self.fails, self.interrupted_at, self.seconds = extra, fails, interrupted_at, seconds
        self.calls: list[tuple[str, int]] = []
        self.jobs: list[list[str]] = []

    def __call__(
        self, arm: Arm, job: list[str], directory: Path, *, method: str, round: int, timeout: float
    ) -> Result:  # fmt: skip
        self.calls.append((arm.name, round))
        self.jobs.append(job)
        if directory.exists():
            shutil.rmtree(directory)
        if len(self.calls) == self.interrupted_at:
            directory.mkdir(parents=True)
            raise KeyboardInterrupt
        failed = self.fails.get(arm.name)
        if failed is None:
            record(directory, arm, extra=self.extra.get(arm.name, 0.0), round=round)
        else:
            directory.mkdir(parents=True)
        result = Result(
            arm=arm.name, round=round, status=0 if failed is None else 1, error=failed or "", seconds=self.seconds,
            host_gib=1.0, device_gib=0.0, load_average=0.1,
        )  # fmt: skip
        result.write(directory)
        return result
