"""Mixture-of-experts models in the fsdp engine: the checkpoint's separate experts, transformers' stacked ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.models.safetensors_source import SafetensorsSource
from tests.distributed.engines.train.fsdp.test_engine import make_samples
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5},
}


def load_score_export(world: World, path: Path, target: Path) -> list[list[float]]:
    engine = FSDPEngine(path, TrainConfig(), world=world, total_steps=1)
    layout = engine.shard_map().validate()
    local = engine.local_tensors()
    checkpoint = load_file(path / "model.safetensors")
    for piece in layout.ranks[world.rank]:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        held = local[piece.tensor].as_strided(
            piece.sizes, piece.strides, local[piece.tensor].storage_offset() + piece.start
        )
        assert torch.equal(held, checkpoint[piece.param][box]), piece
    samples = make_samples(4)
    scores = engine.logprobs(samples)
    engine.export(target)
    return scores


@pytest.mark.parametrize("arch", MODELS)
def test_loads_describes_scores_and_exports(arch: str, tmp_path: Path) -> None:
    """Over three ranks, which the experts do not divide by: shards, values and files are the checkpoint's."""
    path = make_tiny(tmp_path / "model", arch, head_dim=8, **MODELS[arch])
    scores = run_ranks(3, load_score_export, path, tmp_path / "exported", timeout=120)[0]
    original, exported = load_file(path / "model.safetensors"), SafetensorsSource(tmp_path / "exported")
    assert sorted(original) == sorted(exported.names())
    assert all(torch.equal(original[name], exported[name]) for name in original)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    for sample, found in zip(make_samples(4), scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0].float()
        start = len(sample.prompt_ids) - 1
        expected = logits[start:-1].log_softmax(-1)[range(len(sample.response_ids)), sample.response_ids]
        assert (torch.tensor(found) - expected).abs().max() < 1e-5
