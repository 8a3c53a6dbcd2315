"""Engine processes that are killed under the whole program: one retried step each, and a clean end at the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, curve, environment
from tests.engines.test_separate import needs_sglang

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length", "sampling/logp_difference/max")


def deadly(overrides: list[str], moments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, "tests/e2e/deadly.py", *overrides],
        capture_output=True,
        text=True,
        timeout=800,
        env=environment() | {"DEADLY": moments, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )


def kills(output: str) -> list[str]:
    return [line.split(": killing")[0] for line in output.splitlines() if line.startswith("DEADLY")]


def engines_of(job: Path) -> list[str]:
    """Engine processes that belong to the job, by its output directory in their environment."""
    mark, found = f"DEATH_TEST={job}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.engine
@pytest.mark.timeout(900)
@needs_sglang
def test_sglang_killed_in_generation_and_in_a_sync_changes_nothing(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 over two ranks, SGLang at TP 2. The numbers are those of an undisturbed run, bit by bit.

    Sync 1 is step 1's. Step 2 is tried three times: killed while requests come in, in its second sync (the third of
    the run), then done. Step 3 takes sync 5, and step 4 dies in sync 6, which is one death too many.
    """
    monkeypatch.setenv("DEATH_TEST", str(tmp_path))
    job = [*SMALL, f"model.path={small_model}", "rollout=sglang", "rollout.max_restarts=2"]
    whole = deadly([*job, f"output_dir={tmp_path / 'whole'}", "steps=3"], "")
    assert whole.returncode == 0, whole.stderr[-4000:]
    killed = deadly([*job, f"output_dir={tmp_path / 'killed'}", "steps=5"], "request:40,sync:3,sync:6")
    output = killed.stdout + killed.stderr
    assert killed.returncode != 0
    assert kills(killed.stdout) == ["DEADLY: request 40", "DEADLY: sync 3", "DEADLY: sync 6"]
    assert curve(tmp_path / "killed", *NUMBERS) == curve(tmp_path / "whole", *NUMBERS)
    assert all(numbers[-1] <= 1e-5 for numbers in curve(tmp_path / "killed", *NUMBERS))
    assert [n for (n,) in curve(tmp_path / "killed", "rollout/restarts")] == [0, 2, 2]
    assert "was killed by SIGKILL" in output and "starting it again" in output
    assert "hybridengine: PeerError" not in output
    assert "died 3 times, and rollout.max_restarts=2" in output, output[-4000:]
    assert (tmp_path / "killed/checkpoints/step_00000003").is_dir()
    assert engines_of(tmp_path) == []


@pytest.mark.engine
def test_a_rollout_pool_revives_its_engine_and_ends_well_at_the_limit(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of one rank with vLLM in a process of its own, killed at the second token of step 1, in the sync of step
    2, and once too often in that of step 3. What the revived engine generates with are the trainer's weights.
    """
    monkeypatch.setenv("DEATH_TEST", str(tmp_path))
    job = [
        *SMALL, "rollout=vllm", "rollout.process=separate", "rollout.tp=1", "rollout.max_restarts=2",
        "placement=disaggregated", f"model.path={small_model}", f"output_dir={tmp_path}", "steps=5",
    ]  # fmt: skip
    killed = deadly(job, "token:2,sync:2,sync:3")
    output = killed.stdout + killed.stderr
    assert killed.returncode != 0
    assert kills(killed.stdout) == ["DEADLY: token 2", "DEADLY: sync 2", "DEADLY: sync 3"], output[-4000:]
    assert all(difference <= 1e-5 for (difference,) in curve(tmp_path, "sampling/logp_difference/max"))
    assert [n for (n,) in curve(tmp_path, "rollout/restarts")] == [0, 2]  # told with the next sync
    assert [n for (n,) in curve(tmp_path, "policy_version")] == [1, 2]
    assert "died 3 times, and rollout.max_restarts=2" in output and "was killed by SIGKILL" in output, output[-4000:]
    assert "hybridengine: finishing the weight sync to policy version 2: rank 1 failed" in output, output[-4000:]
    assert output.count("Traceback") == 1, output[-4000:]  # the launcher's
    assert (tmp_path / "checkpoints/step_00000002").is_dir()
    assert engines_of(tmp_path) == []
