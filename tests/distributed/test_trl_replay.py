"""Rollouts that TRL 1.16.0 trained on, through ours: the same weights after all steps.

``trl_replay.json`` was written by scripts/peer_replay.py: tokens and rewards of each rollout, and a sample of the
weights that TRL ended with, from the same random model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.algorithms.losses import LossCounts
from hybridengine.algorithms.registry import ALGORITHMS
from hybridengine.config import AlgorithmConfig, RolloutConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.types import Prompt, Sample, Trajectory
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

FILE = Path(__file__).parent / "trl_replay.json"
SAMPLED = 8

#: How TRL's variants are called here.
OURS: dict[str, dict[str, Any]] = {
    "on-policy": {"name": "grpo", "loss_aggregation": "token-mean"},
    "two-passes-with-kl": {
        "name": "grpo", "loss_aggregation": "seq-mean-token-mean", "epochs": 2, "clip_high": 0.28, "kl_coef": 0.05,
        "kl_estimator": "k3_ratio",
    },
    "cispo": {"name": "cispo", "loss_aggregation": "token-mean", "epochs": 2, "clip_low": 1.0, "clip_high": 0.5},
}  # fmt: skip


def make_model(path: Path) -> Path:
    """The model that both train; 1 ends. It names no pad token: transformers would drop the gradient of its embedding,
    also where it was sampled (see tests/unit/engines/train/fsdp/test_pad_token.py)."""
    return make_tiny(path, "qwen2", std=0.15, pad_token_id=None, bos_token_id=None, eos_token_id=1)


def sampled_weights(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """A few elements of each parameter, evenly spaced, and last its norm."""
    found = {}
    for name, value in sorted(weights.items()):
        flat = value.double().flatten()
        chosen = flat[torch.linspace(0, len(flat) - 1, SAMPLED).long()]
        found[name] = [round(x, 8) for x in [*chosen.tolist(), flat.norm().item()]]
    return found


def trajectories(rollout: dict[str, Any], samples: int) -> list[Trajectory]:
    rows = zip(rollout["prompts"], rollout["responses"], rollout["rewards"], strict=True)
    return [
        Trajectory(
            prompt=Prompt(index=i // samples, token_ids=prompt), sample_index=i % samples, token_ids=response,
            logprobs=[0.0] * len(response), versions=[0] * len(response), truncated=False, reward=reward,
        )
        for i, (prompt, response, reward) in enumerate(rows)
    ]  # fmt: skip


def replay(world: World, path: Path, name: str) -> dict[str, Any]:
    """All recorded steps through samples, loss and optimizer; each rank takes its share of the sequences."""
    recorded = json.loads(FILE.read_text())
    variant, size = recorded["variants"][name], recorded["samples_per_prompt"]
    config = AlgorithmConfig(advantage="group_mean", **OURS[name])
    algorithm = ALGORITHMS[config.name](config, RolloutConfig(samples_per_prompt=size))
    train = TrainConfig(lr=2e-3, eps=1e-6, max_grad_norm=1.0, max_tokens_per_micro_batch=64)
    engine = FSDPEngine(path, train, world=world, total_steps=99, reference=algorithm.needs_reference)

    def scores(samples: list[Sample], *, reference: bool = False) -> list[list[float]]:
        return engine.logprobs(samples, reference=reference)  # all of them on every rank: they are few

    advantages = []
    for rollout in variant["rollouts"]:
        given = trajectories(rollout, size)
        plain = algorithm.plain_samples(given)
        references = scores(plain, reference=True) if algorithm.needs_reference else None
        old = scores(plain) if algorithm.needs_old_logprobs else None
        samples, _ = algorithm.samples(given, references, old_logprobs=old)
        advantages.append([sample.advantages[0] for sample in samples])
        for _ in range(config.epochs):
            engine.forward_backward(samples[world.rank :: world.size], algorithm.loss_fn(LossCounts.of(samples)))
            engine.optimizer_step()
    return {"advantages": advantages, "weights": sampled_weights(dict(engine.full_parameters()))}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_trl_s_rollouts_give_trl_s_weights(tmp_path: Path, name: str, world_size: int) -> None:
    variant = json.loads(FILE.read_text())["variants"][name]
    found = run_ranks(world_size, replay, make_model(tmp_path), name)[0]
    for rollout, advantages in zip(variant["rollouts"], found["advantages"], strict=True):
        assert advantages == pytest.approx(rollout["advantages"], abs=1e-6)
    assert found["weights"].keys() == variant["weights"].keys()
    initial = sampled_weights(dict(torch_model(tmp_path)))
    for parameter, values in variant["weights"].items():
        assert found["weights"][parameter] == pytest.approx(values, abs=2e-6, rel=1e-6), parameter
        assert values != pytest.approx(initial[parameter], abs=1e-3), f"{parameter} has not moved"


def torch_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return ((name, p.detach()) for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters())
