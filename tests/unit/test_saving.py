"""When checkpoints are due, which one is the best, and how another program finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.checkpoint.policy import SavePolicy
from hybridengine.config import CheckpointConfig
from hybridengine.config.schema import ConfigError
from hybridengine.report.runs import choose_checkpoint


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Engine:
    """What a checkpoint needs of an engine: its state is its version."""

    version = 0

    def save(self, path: Path) -> None:
        (path / "state").write_text(str(self.version))

    def load(self, path: Path) -> None:
        self.version = int((path / "state").read_text())


def due_steps(directory: Path, clock: Clock, *, seconds_per_step: float, steps: int, **config: Any) -> list[int]:
    policy = SavePolicy(CheckpointConfig(**config), directory, clock=clock)
    found = []
    for step in range(1, steps + 1):
        clock.seconds += seconds_per_step
        if policy.due(step):
            found.append(step)
            policy.saved()
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"minutes": 30}, [3, 6, 9]),  # steps of 10 minutes
        ({"minutes": 25}, [3, 6, 9]),  # at the end of the step in which they are over
        ({"minutes": 0}, []),
        ({"minutes": 0, "every": 4}, [4, 8]),
        ({"minutes": 30, "every": 4}, [3, 4, 7, 8]),  # the clock starts anew with every checkpoint
        ({}, [3, 6, 9]),  # by default every half an hour
    ],
    ids=["half-hour", "in-mid-step", "off", "steps", "both", "default"],
)
def test_due(tmp_path: Path, config: dict[str, Any], expected: list[int]) -> None:
    assert due_steps(tmp_path, Clock(), seconds_per_step=600, steps=9, **config) == expected


@pytest.mark.parametrize(
    ("best", "values", "expected"),
    [
        ("validation/accuracy", [0.3, None, 0.5, 0.5, 0.4, 0.6], [0, 2, 5]),
        ("min:validation/accuracy", [0.3, None, 0.5, 0.2, float("nan")], [0, 3]),
        (None, [0.3, 0.5], []),
    ],
    ids=["most", "least", "none"],
)
def test_improved(tmp_path: Path, best: str | None, values: list[float | None], expected: list[int]) -> None:
    policy = SavePolicy(CheckpointConfig(best=best), tmp_path)
    records = [{"reward": 0.0} if value is None else {"validation/accuracy": value} for value in values]
    assert [i for i, record in enumerate(records) if policy.improved(record)] == expected


def test_a_resumed_run_knows_what_was_best(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(json.dumps({"metric": "reward", "value": 0.5, "step": 3, "checkpoint": "x"}))
    policy = SavePolicy(CheckpointConfig(best="reward"), tmp_path)
    assert [policy.improved({"reward": value}) for value in (0.4, 0.6)] == [False, True]
    other = SavePolicy(CheckpointConfig(best="min:reward"), tmp_path)
    assert other.improved({"reward": 0.9})


@pytest.mark.parametrize(
    ("best", "record"),
    [("rewards", {"reward": 1.0}), ("validation/acuracy", {"validation/accuracy": 1.0, "reward": 1.0})],
    ids=["first-step", "first-validation"],
)
def test_a_metric_that_there_is_not(tmp_path: Path, best: str, record: dict[str, float]) -> None:
    policy = SavePolicy(CheckpointConfig(best=best), tmp_path)
    with pytest.raises(ValueError, match=f"checkpoint.best={best}: no such metric; a step has .*reward"):
        policy.improved(record)


def save_steps(directory: Path, steps: int, *, keep: int, best: set[int]) -> Checkpointer:
    checkpointer, engine = Checkpointer(directory, keep, config={"name": "x"}), Engine()
    for step in range(1, steps + 1):
        engine.version = step
        path = checkpointer.save(step, engine, {"step": step})
        if step in best:
            checkpointer.mark_best(path, step, "reward", float(step))
    return checkpointer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*"))


@pytest.mark.parametrize(
    ("keep", "best", "expected"),
    [(1, {2}, [2, 5]), (2, {1, 3}, [3, 4, 5]), (1, {5}, [5]), (0, {2}, [1, 2, 3, 4, 5]), (2, {4}, [4, 5])],
    ids=["older", "the-better-of-two", "newest", "all-are-kept", "among-the-newest"],
)
def test_the_best_is_kept_beside_the_newest(tmp_path: Path, keep: int, best: set[int], expected: list[int]) -> None:
    checkpointer = save_steps(tmp_path, 5, keep=keep, best=best)
    assert names(tmp_path) == [f"step_{step:08d}" for step in expected]
    assert checkpointer.best() == tmp_path / f"step_{max(best):08d}"


def test_a_fresh_start_forgets_what_was_best(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, 2, keep=0, best={2})
    assert checkpointer.load(Engine(), "auto") == {"step": 2} and checkpointer.best() is not None
    assert checkpointer.load(Engine(), "never") is None and checkpointer.best() is None


def test_which_checkpoint_another_program_takes(tmp_path: Path) -> None:
    save_steps(tmp_path / "checkpoints", 4, keep=0, best={2})
    assert choose_checkpoint(tmp_path).step == 4
    assert choose_checkpoint(tmp_path, step=3).step == 3
    assert choose_checkpoint(tmp_path, best=True).step == 2
    assert choose_checkpoint(tmp_path / "checkpoints" / "step_00000001").step == 1
    assert choose_checkpoint(tmp_path).config == {"name": "x"}
    (tmp_path / "checkpoints" / "latest").write_text("step_00000003")
    assert choose_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"step": 9}, "no checkpoint after step 9; it has those after step 1, 2"), ({"best": True}, "no best checkpoint")],
    ids=["step", "best"],
)
def test_checkpoints_that_there_are_not(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_steps(tmp_path / "checkpoints", 2, keep=0, best=set())
    with pytest.raises(ConfigError, match=message):
        choose_checkpoint(tmp_path, **options)
    with pytest.raises(ConfigError, match="no checkpoints; give a run's directory"):
        choose_checkpoint(tmp_path / "elsewhere", **options)
