"""The whole program on one GPU, without vLLM: FSDP2, the transformers engine, offloading and the transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, curve, records, run

JOB = [*SMALL, "rollout=transformers", "rollout.tp=1", "steps=4", "validate_every=2"]
NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")


@pytest.mark.parametrize("method", ["pull", "collective", "gather"])
def test_trains_with_parity(small_model: Path, tmp_path: Path, method: str) -> None:
    run([*JOB, f"model.path={small_model}", f"output_dir={tmp_path}", f"sync.method={method}"], timeout=250)
    assert len(curve(tmp_path, "loss")) == 4
    assert all(r["sampling/logp_difference/max"] <= 1e-3 for r in records(tmp_path) if r["step"] > 0)


def test_offloading_and_resuming_change_no_number(small_model: Path, tmp_path: Path) -> None:
    """Everything away between its uses, or nothing: the same curves; and a checkpoint goes on where it was."""
    job = [*JOB, f"model.path={small_model}", "algorithm.epochs=2", "algorithm.mini_batches=2", "algorithm.kl_coef=0.1"]
    stay = ["memory.offload_optimizer=false", "memory.offload_weights=false", "rollout.sleep_level=0"]
    away, here, parts = tmp_path / "away", tmp_path / "here", tmp_path / "parts"
    run([*job, f"output_dir={away}"], timeout=250)
    run([*job, f"output_dir={here}", *stay], timeout=250)
    run([*job, f"output_dir={parts}", "steps=2"], timeout=250)
    run([*job, f"output_dir={parts}", "steps=4"], timeout=250)
    assert curve(away, *NUMBERS) == curve(here, *NUMBERS)
    assert curve(parts, *NUMBERS) == curve(here, *NUMBERS)
    last = records(away)[-1]
    assert last["memory/rollout/peak_gib"] > 0


def test_bfloat16_compute(small_model: Path, tmp_path: Path) -> None:
    job = [*JOB, "train=fsdp_bf16", "rollout.dtype=bfloat16", "algorithm.correction=tis"]
    run([*job, f"model.path={small_model}", f"output_dir={tmp_path}"], timeout=250)
    assert all(r["grad_norm"] > 0 for r in records(tmp_path) if r["step"] > 0)
