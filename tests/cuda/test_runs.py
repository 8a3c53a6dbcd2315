"""Whole training runs over the stand-ins: every phase of the CUDA branches, in the order that the program takes them.

The weights that the engine serves are the trainer's in every step, or the log-probabilities of both would differ.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SMALL, curve, environment, records

pytestmark = pytest.mark.engine

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")
#: The most that the two engines' log-probabilities of the same tokens may differ by dtype.
CLOSE = {"float32": 1e-5, "bfloat16": 0.2}


def train(ranks: int, overrides: list[str], output_dir: Path, *, deadly: str = "") -> str:
    """Run it; returns what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = [f"output_dir={output_dir}", "rollout.enforce_eager=true"]
    cache = "rollout.engine_kwargs={kv_cache_memory_bytes: 16777216}"
    done = subprocess.run(
        [*launcher, "-m", "tests.cuda.train", *SMALL, *settings, cache, *overrides],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment() | ({"DEADLY": deadly} if deadly else {}),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def differences(output_dir: Path) -> list[float]:
    return [r["sampling/logp_difference/max"] for r in records(output_dir) if r["step"] > 0]


def test_one_rank_sleeps_deeply_and_resumes_exactly(small_model: Path, tmp_path: Path) -> None:
    """Everything leaves: level 2, weights, optimizer, a reference. Step 3 after a resume is step 3 of the whole run."""
    job = [
        f"model.path={small_model}", "rollout.tp=1", "rollout.sleep_level=2", "memory.offload_weights=true",
        "memory.offload_optimizer=true", "algorithm.kl_coef=0.1", "checkpoint.every=2", "steps=3", "validate_every=2",
    ]  # fmt: skip
    output = train(1, job, tmp_path / "whole")
    assert "trainer_params, optimizer" in output and "rollout_weights, kv_cache dropped" in output
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step_00000003")
    train(1, job, tmp_path / "resumed")
    assert curve(tmp_path / "resumed", *NUMBERS) == curve(tmp_path / "whole", *NUMBERS)
    assert len(curve(tmp_path / "whole", *NUMBERS)) == 3
    assert max(differences(tmp_path / "whole")) < CLOSE["float32"]


def test_two_ranks_read_each_others_shards(small_model: Path, tmp_path: Path) -> None:
    """bfloat16 throughout, TP 2, level 1: weights go to host memory and back; shards stay, so peers map them."""
    job = [
        f"model.path={small_model}", "rollout.tp=2", "rollout.sleep_level=1", "memory.offload_weights=false",
        "train.dtype=bfloat16", "rollout.dtype=bfloat16", "steps=2",
    ]  # fmt: skip
    output = train(2, job, tmp_path)
    assert "weight sync: pull (auto" in output and "rollout_weights to host" in output
    assert max(differences(tmp_path)) < CLOSE["bfloat16"]
    assert all(record["sync/bytes_received"] > 0 for record in records(tmp_path) if record["step"] > 0)


def test_megatron_stages_weights_for_an_engine_in_a_process_of_its_own(small_model: Path, tmp_path: Path) -> None:
    """The weights of its engine are mapped over CUDA IPC; it is killed in the second sync, and the step repeated."""
    job = [
        f"model.path={small_model}", "train=megatron", "rollout.tp=1", "rollout.process=separate",
        "rollout.sleep_level=1", "memory.offload_weights=true", "rollout.max_restarts=1", "steps=2",
    ]  # fmt: skip
    output = train(2, job, tmp_path, deadly="sync:2")
    assert "DEADLY: sync 2: killing" in output and "starting it again" in output
    assert "trainer_params, optimizer to host" in output and "rollout_weights stay" in output
    assert max(differences(tmp_path)) < CLOSE["float32"]


def test_pools_hand_over_through_ipc(small_model: Path, tmp_path: Path) -> None:
    job = [
        f"model.path={small_model}", "placement=disaggregated", "rollout.tp=1", "steps=2",
    ]  # fmt: skip
    output = train(2, job, tmp_path)
    assert "weight sync: pull (auto" in output
    assert max(differences(tmp_path)) < CLOSE["float32"]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
