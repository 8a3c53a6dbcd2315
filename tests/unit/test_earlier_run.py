"""A run repeated, finished, changed or continued: decided from the checkpoint's own record, before anything starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridengine.config.compose import ConfigError, build
from hybridengine.validate.earlier_run import check_earlier_run

BASE = ["+experiment=quickstart"]


def leave_run(directory: Path, *overrides: str, step: int, total_steps: int | None = None) -> None:
    """What a run leaves: a complete checkpoint with its configuration, and a summary."""
    config = build([*BASE, f"output_dir={directory}", *overrides])
    checkpoint = directory / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    meta = {"step": step, "world_size": 2, "version": step, "saved_at_ns": step, "config": dataclasses.asdict(config)}
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    (directory / "checkpoints" / "latest").write_text(checkpoint.name)
    if total_steps is not None:
        (directory / "summary.json").write_text(json.dumps({"steps": step, "total_steps": total_steps}))


def verdict(directory: Path, *overrides: str) -> str | None:
    return check_earlier_run(build([*BASE, f"output_dir={directory}", *overrides]))


def test_nothing_there(tmp_path: Path) -> None:
    assert verdict(tmp_path / "new") is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["seed=2"], "seed was 1, now 2"),
        (["seed=2", "steps=20"], "seed was 1, now 2"),
        (["data.max_prompt_tokens=30"], "data.max_prompt_tokens was 24, now 30"),
    ],
)
def test_another_run_is_refused_with_a_directory_of_its_own(tmp_path: Path, changes: list[str], line: str) -> None:
    leave_run(tmp_path / "run", step=40, total_steps=40)
    with pytest.raises(ConfigError) as caught:
        verdict(tmp_path / "run", *changes)
    assert line in str(caught.value) and "(step 40 of 40)" in str(caught.value)
    assert f"output_dir={tmp_path / 'run-2'}" in str(caught.value)
    assert verdict(tmp_path / "run", *changes, "checkpoint.resume=never") is None


def test_the_suggested_directory_is_free(tmp_path: Path) -> None:
    leave_run(tmp_path / "run", step=40)
    (tmp_path / "run-2").mkdir()
    with pytest.raises(ConfigError, match="run-3"):
        verdict(tmp_path / "run", "seed=2")


@pytest.mark.parametrize("changes", [[], ["steps=20"], ["train.lr=1"]], ids=["same", "fewer-steps", "other-rate"])
def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, changes: list[str]) -> None:
    leave_run(tmp_path, step=40, total_steps=40)
    text = verdict(tmp_path, *changes)
    assert text is not None and "is at step 40 of 40" in text and "nothing left to do" in text


@pytest.mark.parametrize("changes", [["steps=80"], ["steps=41", "train.lr=1"]], ids=["more-steps", "and-another-rate"])
def test_more_steps_go_on(tmp_path: Path, changes: list[str]) -> None:
    leave_run(tmp_path, step=40, total_steps=40)
    assert verdict(tmp_path, *changes) is None


def test_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    leave_run(tmp_path, step=12)
    assert verdict(tmp_path) is None


@pytest.mark.parametrize(("changes", "finished"), [([], True), (["epochs=3"], False)], ids=["same", "more-epochs"])
def test_epochs_instead_of_steps(tmp_path: Path, changes: list[str], finished: bool) -> None:
    """How many steps they are is known from the run's summary."""
    leave_run(tmp_path, "steps=null", "epochs=2", step=250, total_steps=250)
    text = verdict(tmp_path, "steps=null", *(changes or ["epochs=2"]))
    assert (text is not None) == finished


def test_a_checkpoint_that_is_named(tmp_path: Path) -> None:
    leave_run(tmp_path / "old", step=12)
    named = tmp_path / "old" / "checkpoints" / "step_00000012"
    assert verdict(tmp_path / "new", f"checkpoint.resume={named}") is None
    with pytest.raises(ConfigError, match=f"no checkpoint; there are {named}"):
        verdict(tmp_path / "new", f"checkpoint.resume={tmp_path / 'old'}")
    with pytest.raises(ConfigError, match="seed was 1, now 2"):
        verdict(tmp_path / "new", f"checkpoint.resume={named}", "seed=2")


def test_the_command_answers_at_once_and_changes_nothing(tmp_path: Path) -> None:
    leave_run(tmp_path, step=40, total_steps=40)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    answers = {}
    for changes in ([], ["seed=2", "steps=20"]):
        started = time.monotonic()
        command = [sys.executable, "-m", "hybridengine.train", *BASE, f"output_dir={tmp_path}", *changes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        answers[done.returncode] = done.stdout + done.stderr
        assert time.monotonic() - started < 10  # a second on an idle machine; torch alone takes longer to import
    assert "nothing left to do" in answers[0] and "Traceback" not in answers[0]
    assert "seed was 1, now 2" in answers[2] and "Traceback" not in answers[2]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
