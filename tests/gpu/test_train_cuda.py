"""The whole program on one GPU, without vLLM: FSDP2, the transformers engine and the handoff on CUDA memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import small_model  # noqa: F401  a fixture
from tests.e2e.runs import SMALL, curve, records, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

JOB = [*SMALL, "rollout=transformers", "rollout.tp=1", "steps=4", "validate_every=2"]


@pytest.mark.parametrize("method", ["collective", "gather"])
def test_trains_with_parity(small_model: Path, tmp_path: Path, method: str) -> None:  # noqa: F811
    run([*JOB, f"model.path={small_model}", f"output_dir={tmp_path}", f"handoff.method={method}"], timeout=400)
    assert len(curve(tmp_path, "loss")) == 4
    assert all(r["sampling/logp_difference/max"] <= 1e-3 for r in records(tmp_path) if r["step"] > 0)


def test_bfloat16_compute(small_model: Path, tmp_path: Path) -> None:  # noqa: F811
    job = [*JOB, "train=fsdp_bf16", "rollout.dtype=bfloat16", "algorithm.correction=tis"]
    run([*job, f"model.path={small_model}", f"output_dir={tmp_path}"], timeout=400)
    assert all(r["grad_norm"] > 0 for r in records(tmp_path) if r["step"] > 0)
