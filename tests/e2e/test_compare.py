"""hybridengine compare as a user types it: real arms under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, environment

ARMS = "colocated-sync,disaggregated-1+1-async_in_order,disaggregated-1+1-sync"


def compare(job: list[str], out: Path, *options: str) -> tuple[dict[str, object], str]:
    command = [sys.executable, "-m", "hybridengine.compare", "--out", str(out), *options, *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_arms_are_compared_once_and_nothing_of_the_users_is_touched(small_model: Path, tmp_path: Path) -> None:
    """Three arms of a small job; again, nothing is left to run, and the verdict is the same."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "metrics.jsonl").write_text("precious")
    job = [*SMALL, "rollout=transformers", "rollout.tp=1", f"model.path={small_model}", f"output_dir={mine}"]
    options = ("--ranks", "2", "--arms", ARMS, "--rounds", "1", "--steps", "4", "--warmup", "1")
    out = tmp_path / "out"
    found, shown = compare(job, out, *options)
    assert found["failed"] == {} and found["left_out"] == {}
    arms = {arm["name"]: arm for arm in found["arms"]}  # type: ignore[attr-defined]
    assert set(arms) == set(ARMS.split(",")) and found["winner"] in arms
    assert all(arm["tokens_per_second"] > 0 and arm["host_gib"] > 0.1 for arm in arms.values())
    colocated, apart = arms["colocated-sync"], arms["disaggregated-1+1-sync"]
    assert colocated["tokens"] == apart["tokens"] and colocated["reward_last"] == apart["reward_last"]
    assert arms["disaggregated-1+1-async_in_order"]["dropped_groups"] == 0
    assert (out / "compare.html").is_file() and (out / "gantt.png").is_file()
    assert [path.name for path in mine.iterdir()] == ["metrics.jsonl"] and (
        mine / "metrics.jsonl"
    ).read_text() == "precious"
    assert not list(out.rglob("checkpoints"))
    assert "hybridengine train" in shown
    again, shown = compare(job, out, *options)
    assert "going on after 3 runs" in shown
    assert (again["winner"], again["margin"], again["arms"]) == (found["winner"], found["margin"], found["arms"])
