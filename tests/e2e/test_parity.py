"""The parity check of a run and of `doctor parity`: refused by default, said where asked to go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.e2e.runs import SMALL, command, environment, records, run

#: No two implementations agree to the last bit.
IMPOSSIBLE = "parity.tolerance=1e-12"


def test_a_difference_ends_the_run_before_anything_is_trained(small_model: Path, tmp_path: Path) -> None:
    """Over two ranks, whose rollout engine is vLLM; the message comes once and nothing is saved."""
    overrides = [*SMALL, f"model.path={small_model}", f"output_dir={tmp_path / 'out'}", "rollout.tp=2", IMPOSSIBLE,
                 "parity.probe=refuse"]  # fmt: skip
    done = subprocess.run(
        command(overrides, ranks=2), capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert said.count("parity.probe=refuse: rollout engine and trainer disagree by more than 1e-12") == 1, said[-4000:]
    assert "likely cause: " in said and "against plain transformers: mean |Δlogprob|" in said
    ours = said.partition("Root Cause")[2]  # before it, torchrun's own traceback
    assert "Invalid process group" not in said and ours and "Traceback" not in ours
    metrics = tmp_path / "out" / "metrics.jsonl"
    assert not list((tmp_path / "out" / "checkpoints").glob("step_*"))
    assert not metrics.exists() or not metrics.read_text(), "nothing was trained"


def test_a_difference_that_is_only_said(small_model: Path, tmp_path: Path) -> None:
    """Both placements and every side, plain transformers included; without rounding to complain of, only in run.log."""
    overrides = [*SMALL, f"model.path={small_model}", "rollout=transformers", "rollout.tp=1", "steps=1"]
    warned = run([*overrides, f"output_dir={tmp_path / 'warned'}", "parity.probe=warn", IMPOSSIBLE])
    assert warned.stdout.count("WARNING: rollout engine and trainer disagree by more than 1e-12") == 1
    apart = [
        "parity.probe=refuse",
        "placement=disaggregated",
        "placement.rollout_ranks=1",
        f"output_dir={tmp_path / 'apart'}",
    ]
    quiet = run([*overrides, *apart], ranks=2)
    assert "disagree" not in quiet.stdout
    assert "Loading weights" not in warned.stderr + quiet.stderr  # the model that only the check loads
    for output in ("warned", "apart"):
        assert [r["step"] for r in records(tmp_path / output)] == [1]
    log = (tmp_path / "apart" / "run.log").read_text()
    for side in ("the trainer, packed", "the trainer, padded", "plain transformers"):
        assert f"parity: rollout engine against {side}: mean |Δlogprob|" in log, log


@pytest.mark.parametrize(("options", "status"), [([], 0), ([IMPOSSIBLE], 1)], ids=["agrees", "differs"])
def test_doctor_parity_alone(small_model: Path, options: list[str], status: int) -> None:
    words = ["rollout=transformers", "rollout.max_model_len=64", "data.max_prompt_tokens=32", "rollout.max_tokens=32"]
    done = subprocess.run(
        [sys.executable, "-m", "hybridengine.doctor", "parity", f"model.path={small_model}", *words, *options],
        capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("rollout engine against") == 3
    assert ("agrees within 0.001" in done.stdout) == (status == 0)


def test_doctor_parity_refuses_what_is_wrong_with_the_keys(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridengine.doctor", "parity", f"model.path={tmp_path}"],
        capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and "no config.json in it" in done.stdout
