"""Schedules and placements as a user runs them: the same numbers where they promise it, and ends well where it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, command, curve, environment, records, run

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")
REFERENCE = ["rollout=transformers", "rollout.tp=1"]
APART = ["placement=disaggregated", "rollout.tp=1"]


def test_another_placement_changes_no_number(small_model: Path, tmp_path: Path) -> None:
    """Strictly in turn, on one rank or on two pools of one: the same curve, by way of files and of changes too."""
    job = [*SMALL, *REFERENCE, f"model.path={small_model}", "steps=3", "validate_every=3"]
    run([*job, f"output_dir={tmp_path / 'colocated'}"])
    expected = curve(tmp_path / "colocated", *NUMBERS)
    for method in ("broadcast", "delta", "checkpoint"):
        place = tmp_path / method
        done = run([*job, *APART, f"sync.method={method}", f"output_dir={place}"], ranks=2)
        assert curve(place, *NUMBERS) == expected, method
        assert f"weight sync: {method}" in done.stdout and "1 training rank(s), 1 rollout rank(s)" in done.stdout
        assert all(r["sampling/logp_difference/max"] <= 1e-5 for r in records(place) if r["step"] > 0)


def test_partial_resumes_with_what_was_unfinished(small_model: Path, tmp_path: Path) -> None:
    """Interrupted samples are saved with their tokens: the resumed run is the uninterrupted one, bit for bit."""
    job = [
        *SMALL, *REFERENCE, f"model.path={small_model}", "schedule=partial", "schedule.over_provision=2",
        "rollout.max_tokens=16",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run([*job, "steps=5", f"output_dir={whole}"])
    run([*job, "steps=3", f"output_dir={parts}"])
    run([*job, "steps=5", f"output_dir={parts}"])
    assert curve(parts, *NUMBERS) == curve(whole, *NUMBERS)
    steps = [r for r in records(whole) if r["step"] > 0]
    assert sum(r["rollout/recycled_samples"] for r in steps) > 0
    assert any(r["rollout/open_groups"] > 0 for r in steps)
    assert all("sampling/effective_sample_size" in r for r in steps)


def test_sync_between_pools_resumes_exactly(small_model: Path, tmp_path: Path) -> None:
    job = [*SMALL, *REFERENCE, *APART, f"model.path={small_model}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run([*job, "steps=4", f"output_dir={whole}"], ranks=2)
    run([*job, "steps=2", f"output_dir={parts}"], ranks=2)
    run([*job, "steps=4", f"output_dir={parts}"], ranks=2)
    assert curve(parts, *NUMBERS) == curve(whole, *NUMBERS)


def test_one_step_off_trains_on_samples_of_the_version_before(small_model: Path, tmp_path: Path) -> None:
    job = [*SMALL, *REFERENCE, *APART, f"model.path={small_model}", "schedule=one_step_off"]
    job += ["validate_every=1", "rollout.max_tokens=8", f"output_dir={tmp_path}"]
    run([*job, "steps=2"], ranks=2)
    run([*job, "steps=4"], ranks=2)
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert [r["staleness/max"] for r in steps] == [0, 1, 1, 1], "the resumed run goes on with what was saved"
    assert all(r["rollout/recycled_samples"] == r["staleness/dropped_groups"] == 0 for r in steps if r["step"] != 3)
    assert all("sampling/effective_sample_size" in r for r in steps)


def test_partial_between_pools_goes_on_with_what_was_interrupted(small_model: Path, tmp_path: Path) -> None:
    job = [*SMALL, *REFERENCE, *APART, f"model.path={small_model}", "schedule=partial", "schedule.over_provision=3",
        "rollout.max_tokens=16", "rollout.max_num_seqs=6",
    ]  # fmt: skip
    run([*job, "steps=4", f"output_dir={tmp_path}"], ranks=2)
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert sum(r["rollout/recycled_samples"] for r in steps) > 0
    assert all(r["staleness/dropped_groups"] == 0 for r in steps)
    assert max(r["staleness/max"] for r in steps) > 0


@pytest.mark.engine
def test_async_with_vllm_is_bounded_and_resumes(small_model: Path, tmp_path: Path) -> None:
    job = [
        *SMALL, *APART, f"model.path={small_model}", "schedule=async", "schedule.staleness=2", "validate_every=3",
        "data.validation_size=8", "checkpoint.every=2",
    ]  # fmt: skip
    run([*job, "steps=3", f"output_dir={tmp_path}"], ranks=2)
    run([*job, "steps=6", f"output_dir={tmp_path}"], ranks=2)
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["step"] for r in steps] == list(range(1, 7))
    assert max(r["staleness/max"] for r in steps) == 2  # reached, never exceeded
    assert all(r["staleness/dropped_groups"] == 0 for r in steps)
    assert any(r["sampling/off_policy_tokens"] > 0 for r in steps if "sampling/off_policy_tokens" in r)
    assert all(0 < r["sampling/effective_sample_size"] <= 1 for r in steps)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stands-still", marks=pytest.mark.slow),  # the launcher takes its time
    ],
)
def test_losing_the_rollout_pool_saves_and_says_so(small_model: Path, tmp_path: Path, end: signal.Signals) -> None:
    """The rank that generates is killed, or stands still: the trainer's last state is on disk, nothing hangs, and the
    run can go on."""
    job = [*SMALL, *REFERENCE, *APART, f"model.path={small_model}", f"output_dir={tmp_path}"]
    limit = ["distributed.timeout_seconds=6"] if end == signal.SIGSTOP else []
    process = subprocess.Popen(
        command([*job, *limit, "steps=5000"], ranks=2), env=environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(process, "step 3/5000")
    generating = rollout_process(process.pid)
    os.kill(generating, end)
    begin = time.monotonic()
    if end == signal.SIGSTOP:
        told = until(process, "hybridengine: ")
        words = "has taken no message for 6 s|has said nothing for 6 s|did not|died before|was lost or late"
        assert re.search(words, told), told
        with contextlib.suppress(ProcessLookupError):  # the launcher would wait half a minute for it
            os.kill(generating, signal.SIGKILL)
    rest = process.communicate(timeout=90)[0]
    assert process.returncode != 0 and time.monotonic() - begin < 60
    if end == signal.SIGKILL:
        assert "Traceback" not in rest or "RolloutLostError" in rest or "SIGTERM" in rest, rest[-3000:]
    saved = sorted((tmp_path / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    assert saved and int(saved[-1].name.removeprefix("step_")) >= 3, rest[-3000:]
    step = int(saved[-1].name.removeprefix("step_"))
    done = run([*job, f"steps={step + 2}"], ranks=2)
    assert f"resumed at step {step}" in done.stdout


def until(process: subprocess.Popen[str], text: str) -> str:
    """Read lines up to the one with ``text``, spaces aside; that line."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(" ".join(line.split()))
        if text.strip() in lines[-1]:
            return lines[-1]
    raise AssertionError("\n".join(lines)[-3000:])


def rollout_process(launcher: int) -> int:
    """The child of ``launcher`` that is rank 1 of the job."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PPid:\t{launcher}\n" in status and b"RANK=1" in environ:
            return int(entry.name)
    raise AssertionError("no rank 1")
