"""Whole runs whose reward function exits, hangs, dies or pays for length."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridengine.monitors import STOPPED
from tests.e2e.runs import ROOT, SMALL, command, environment, records

pytestmark = pytest.mark.engine
FUNCTIONS = ROOT / "tests/e2e/functions.py"


def launch(overrides: list[str], *, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command([*SMALL, *overrides], ranks=ranks),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        cwd=ROOT,
    )


def test_sys_exit_in_a_reward_function_is_no_success(small_model: Path, tmp_path: Path) -> None:
    """With status 0, as the function asks for, a scheduler would take the run for finished."""
    done = launch(
        [
            f"model.path={small_model}",
            f"output_dir={tmp_path}",
            "steps=2",
            "rollout.tp=1",
            f"reward.fn={FUNCTIONS}:leaves",
        ]
    )
    assert done.returncode not in (0, 2, 3, 4), done.stdout[-2000:]
    assert "reward leaves on prompt" in done.stderr and "SystemExit: 0" in done.stderr


def test_a_reward_that_hangs_and_dies_costs_samples_and_an_alarm_stops_the_run(
    small_model: Path, tmp_path: Path
) -> None:
    """Two ranks of one replica share the scoring; the run ends at step 3 with its state saved and status 4.

    torchrun's own status is 1 whatever its ranks' are, which it prints.
    """
    done = launch(
        [
            f"model.path={small_model}", f"output_dir={tmp_path}", "steps=6", "rollout.tp=2", "rollout.max_tokens=8",
            f"reward.fn={FUNCTIONS}:unreliable", "reward.isolate=true", "reward.timeout_seconds=1",
            "reward.timeout_budget_seconds=2", "monitor.action=stop",
            "monitor.rules.busy=reward/busy_seconds > 0 for 3",
        ],
        ranks=2,
    )  # fmt: skip
    assert done.returncode == 1 and f"exitcode  : {STOPPED}" in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    steps = records(tmp_path)
    assert [record["step"] for record in steps] == [1, 2, 3]
    failed = sum(record["reward/errors/unreliable"] for record in steps)
    assert 0 < sum(record["reward/timeouts/unreliable"] for record in steps) < failed < 3 * 32
    assert all(record["reward/retries"] >= 0 and record["reward"] > 0 for record in steps)
    assert "ALARM at step 3 (busy): reward/busy_seconds" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"][0]["rule"] == "busy"
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_alarm_on_a_clean_quickstart(tmp_path: Path, seed: int) -> None:
    assert alarms(tmp_path, f"seed={seed}") == []


@pytest.mark.slow
def test_a_reward_for_length_alarms_within_ten_steps(tmp_path: Path) -> None:
    """The embedded model, paid for length instead of right sums."""
    found = alarms(tmp_path, f"reward.fn={FUNCTIONS}:length", "steps=10", "rollout.max_tokens=12")
    assert "length_rewarded" in {alarm["rule"] for alarm in found} and min(alarm["step"] for alarm in found) <= 10


def alarms(output_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """Those of a quickstart with its default rules."""
    quiet = ["logging.report=false", "logging.plot=false", "logging.tensorboard=false", "checkpoint.export=false"]
    job = ["+experiment=quickstart", *quiet, *overrides, f"output_dir={output_dir}"]
    done = subprocess.run(
        command(job, ranks=2), capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((output_dir / "summary.json").read_text())["alarms"]
    assert isinstance(found, list)
    return found
