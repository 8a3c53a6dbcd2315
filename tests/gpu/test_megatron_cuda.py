"""The megatron engine on one GPU: the whole program, float32 and bfloat16, with offloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, curve, records, run

pytest.importorskip("megatron.core", reason="needs megatron-core")

JOB = [*SMALL, "rollout=transformers", "rollout.tp=1", "steps=3"]
NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")


def test_follows_the_curve_of_fsdp(small_model: Path, tmp_path: Path) -> None:
    curves = []
    for engine in ("fsdp", "megatron"):
        job = [*JOB, f"model.path={small_model}", f"output_dir={tmp_path / engine}", f"train={engine}"]
        run([*job, "algorithm.kl_coef=0.05"], timeout=250)
        curves.append(curve(tmp_path / engine, *NUMBERS))
    assert len(curves[1]) == 3
    for mine, reference in zip(curves[1], curves[0], strict=True):
        assert mine == pytest.approx(reference, abs=1e-3)


def test_bfloat16(small_model: Path, tmp_path: Path) -> None:
    job = [*JOB, f"model.path={small_model}", f"output_dir={tmp_path}", "train=megatron", "train.dtype=bfloat16"]
    run([*job, "rollout.dtype=bfloat16"], timeout=250)
    assert all(r["grad_norm"] > 0 for r in records(tmp_path) if r["step"] > 0)
