"""Finished runs for ``--from``: a comparison's directory, or the output directories of any training runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from hybridengine.compare.arms import IN_ORDER, Arm
from hybridengine.compare.launch import read_result
from hybridengine.compare.measured import measure
from hybridengine.compare.run import SETTINGS_FILE, Runs
from hybridengine.simulate.scenario import Scenario

#: Where the page goes when there is no comparison's directory: a run's own is not touched.
FALLBACK = Path("outputs") / "compare-from"


def load(directories: Sequence[Path], *, warmup: int) -> tuple[dict[str, Arm], Runs, Path, str]:
    """Arms by name, their runs, the directory to write into, and the job as one would type it.

    Args:
        warmup: first steps to leave out, where a comparison does not say so itself.

    Raises:
        ValueError: a directory is neither, or holds no finished run; runs of different numbers of ranks.
    """
    arms: dict[str, Arm] = {}
    runs = Runs()
    job, out = "", FALLBACK
    for directory in directories:
        if (directory / SETTINGS_FILE).is_file():
            settings = json.loads((directory / SETTINGS_FILE).read_text())
            job, out = shlex.join(settings["job"]), directory
            _add_comparison(directory, settings["ranks"], int(settings["warmup"]), arms, runs)
        else:
            found = measure("", directory, skip=warmup)
            arm = arm_of(found.run.scenario)
            found.name = arm.name
            arms[arm.name] = arm
            runs.rounds.setdefault(arm.name, []).append(found)
    if not runs.rounds and not runs.failed:
        raise ValueError(f"{', '.join(map(str, directories))}: no finished run in there")
    if len({arm.ranks for arm in arms.values()}) > 1:
        raise ValueError("these runs have different numbers of ranks; only arms with equal devices can be compared")
    return arms, runs, out, job


def _add_comparison(directory: Path, ranks: int, warmup: int, arms: dict[str, Arm], runs: Runs) -> None:
    for place in sorted((directory / "runs").glob("*/round-*")):
        if (result := read_result(place)) is not None:
            runs.add(result, place, warmup=warmup)
            if result.arm in runs.rounds:
                arms[result.arm] = Arm.parse(result.arm, ranks=ranks)


def arm_of(scenario: Scenario) -> Arm:
    """Of a run that the comparison did not start."""
    return Arm(
        ranks=scenario.ranks, rollout_ranks=scenario.rollout_ranks,
        schedule=IN_ORDER if scenario.in_order else scenario.schedule, tp=scenario.tp,
        stealing=scenario.stealing or bool(scenario.rollout_ranks) or scenario.replicas == 1,
    )  # fmt: skip
