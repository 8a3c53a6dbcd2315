"""Megatron's layouts into the real vLLM: bytes at their minimum, the same log-probabilities after each sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.config import RolloutConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.rollout.vllm.engine import VLLMEngine
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.engines.train.megatron.engine import MegatronEngine
from hybridengine.placement.parts import describe_checkpoint, rollout_shard_map
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.types import Prompt, Sample, SamplingParams
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

TRAIN = TrainConfig(lr=1e-2, max_grad_norm=0.5, eps=1e-4)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # One KV head per rank at TP2: the fused projections have the same row order in both engines.
    "qwen2": ("qwen2", {"hidden_size": 128, "vocab_size": 97}),
    "qwen3-tied": ("qwen3", {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4,
                             "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"hidden_size": 64, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 64, "norm_topk_prob": True}),
}  # fmt: skip
#: Training layouts and the transfers each is delivered by.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp2": ({"tp": 2}, ("pull", "collective", "gather")),
    "pp2": ({"pp": 2}, ("pull", "collective", "gather")),
    "dp2": ({}, ("pull",)),
}
MOE_LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ep2": ({"ep": 2}, ("pull", "collective")),
    "tp2-sp": ({"tp": 2, "sequence_parallel": True}, ("pull",)),
}
#: (model, rollout TP, layouts) of each set of processes.
JOBS = {
    "qwen2-into-tp2": ("qwen2", 2, LAYOUTS),
    "qwen3-tied-into-tp1": ("qwen3-tied", 1, LAYOUTS),
    "qwen3-moe-into-tp2": ("qwen3-moe", 2, MOE_LAYOUTS),
}
PROMPTS = [Prompt(index=i, token_ids=[3 + (5 * i + j) % 60 for j in range(2 + i)]) for i in range(4)]


def ascend(logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
    """Some gradient everywhere."""
    loss = -(micro.advantages * logprobs).sum() / 16
    return LossResult(loss, {"loss": loss.detach()})


def deliver(world: World, path: Path, tp: int, layouts: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every layout by every method: two optimizer steps, each synced and compared with what vLLM then samples."""
    rollout = VLLMEngine(
        path, RolloutConfig(engine="vllm", tp=tp, kv_cache_gib=0.0625, max_num_seqs=16), world=world, max_model_len=64
    )
    target = rollout_shard_map(rollout, describe_checkpoint(path)[0])
    found, synced = {}, 0
    for name, (changes, methods) in layouts.items():
        for method in methods:
            train = MegatronEngine(path, TrainConfig(**vars_of(TRAIN) | changes), world=world, total_steps=4)
            plan = build_plan(train.shard_map(), target)
            transfer = make_transfer(method, train, rollout, plan, TransferSettings(world=world, timeout_seconds=60))
            numbers = {"difference": 0.0, "minimum": float(plan.minimum_bytes(world.rank)), "received": 0.0}
            for _ in range(2):
                samples = [
                    Sample(prompt_ids=p.token_ids, response_ids=[7, 9, 11], loss_mask=[True] * 3,
                           advantages=[1.0 - p.index, 0.5, -0.5])
                    for p in PROMPTS
                ]  # fmt: skip
                train.forward_backward(samples[train.replica :: train.num_replicas], ascend)
                train.optimizer_step()
                rollout.begin_update()
                synced += 1
                report = transfer.run(synced)
                rollout.finish_update(synced)
                numbers["received"] = max(numbers["received"], float(report.bytes_received))
                numbers["aliased"] = float(report.bytes_aliased)
                numbers["difference"] = max(numbers["difference"], compare(train, rollout, synced))
            transfer.close()
            found[f"{name} {method}"] = numbers
    return found


def vars_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def compare(train: MegatronEngine, rollout: VLLMEngine, step: int) -> float:
    """Largest |Δ logprob| over what vLLM samples with the delivered weights."""
    trajectories = generate(rollout, PROMPTS, SamplingParams(n=2, max_tokens=8), seed=3, step=step)
    samples = [
        Sample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids, loss_mask=[True] * len(t.token_ids),
               advantages=[0.0] * len(t.token_ids))
        for t in trajectories
    ]  # fmt: skip
    scored = train.logprobs(samples)
    return max(
        abs(a - b) for mine, t in zip(scored, trajectories, strict=True) for a, b in zip(mine, t.logprobs, strict=True)
    )


@pytest.fixture(scope="module", params=JOBS)
def delivered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, tp, layouts = JOBS[request.param]
    arch, overrides = MODELS[model]
    path = make_tiny(tmp_path_factory.mktemp("model") / model, arch, **overrides)
    return request.param, run_ranks(2, deliver, path, tp, layouts, timeout=280)


@pytest.mark.engine
def test_the_same_logprobs_after_each_sync_at_the_fewest_bytes(delivered: Any) -> None:
    job, ranks = delivered
    for rank, found in enumerate(ranks):
        for name, numbers in found.items():
            assert numbers["difference"] <= 1e-5, (job, rank, name, numbers)
            if "gather" not in name:
                assert numbers["received"] == numbers["minimum"], (job, rank, name, numbers)
    if job == "qwen2-into-tp2":
        assert all(found["tp2 pull"]["received"] == 0 for found in ranks)
        assert all(found["pp2 pull"]["received"] > 0 for found in ranks)
    if job == "qwen3-moe-into-tp2":
        assert all(found["tp2-sp pull"]["received"] == 0 for found in ranks)
