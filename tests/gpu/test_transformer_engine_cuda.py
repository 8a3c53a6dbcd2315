"""The megatron engine over the real Transformer Engine, on one GPU, against plain transformers on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.distributed.world import World, init_process_group
from tests.distributed.engines.train.fsdp.test_engine import PolicyGradient, make_samples, reference_logits
from tests.distributed.engines.train.megatron.test_engine import (
    close,
    gradients,
    make_engine,
    recorded_logits,
    split_experts,
)
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("transformer_engine.pytorch", reason="needs transformer_engine")

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": WIDE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("te") / request.param, request.param, **MODELS[request.param])


def on_gpu(world: World, path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # cuBLAS reads it: float32 products without TF32
    world = World.from_env()
    init_process_group(world, timeout_seconds=120)
    engine, samples = make_engine(world, path, changes), make_samples()
    with recorded_logits(engine) as logits:
        engine.forward_backward(samples, PolicyGradient(samples))
    (only,) = logits
    return {
        "logits": only.float().cpu(),
        "gradients": {name: grad.float().cpu() for name, grad in gradients(engine).items()},
        "modules": [name for chunk in engine.policy.chunks for name, _ in chunk.named_parameters()],
        "norm": engine.optimizer_step()["grad_norm"],
    }


def fused(found: dict[str, Any]) -> bool:
    return any(name.endswith("linear_qkv.layer_norm_weight") for name in found["modules"])


def test_float32_equals_transformers(model: Path) -> None:
    (found,) = run_ranks(1, on_gpu, model, {"transformer_engine": "true"}, timeout=240, group=False)
    expected = reference_logits(model)
    assert fused(found)
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-4, rtol=0)
    close(found["gradients"], split_experts(model, expected["gradients"]), 1e-4)


def test_bfloat16_takes_it_and_rounds_as_the_local_layers_do(model: Path) -> None:
    """As far from float32 as the local layers are, give or take half."""
    expected = reference_logits(model)["logits"]
    far = {}
    for wanted in ("auto", "false"):
        changes = {"dtype": "bfloat16", "transformer_engine": wanted}
        (found,) = run_ranks(1, on_gpu, model, changes, timeout=240, group=False)
        assert fused(found) == (wanted == "auto") and found["norm"] > 0
        far[wanted] = (found["logits"] - expected).abs().mean().item()
    assert far["auto"] <= 1.5 * far["false"]
