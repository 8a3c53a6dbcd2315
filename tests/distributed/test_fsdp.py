"""The fsdp engine against plain transformers, and against itself at other world sizes and cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.engines.train.fsdp import FSDPEngine
from hybridengine.types import Sample
from tests.distributed.ranks import RankFailure, run_ranks
from tests.tiny import make_tiny

TEMPERATURE = 0.8


def columns(name: str, shape: tuple[int, ...]) -> int:
    """Row-parallel weights sharded on their input dimension, as tensor parallelism cuts them."""
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


STEPS = 3
#: eps keeps Adam from turning rounding noise in vanishing gradients into whole steps.
TRAIN = TrainConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4, lr_schedule="linear", warmup_steps=1)

#: Ways to cut and compute the same batch: name -> changes of TRAIN, or arguments of the engine.
CUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "small-budget": {"max_tokens_per_micro_batch": 24},
    "padded": {"packing": False, "max_tokens_per_micro_batch": 60},
    "resharding-recomputing": {
        "reshard_after_forward": True,
        "max_tokens_per_micro_batch": 40,
        "activation_checkpointing": True,
    },
    "small-chunks": {"logprob_chunk_tokens": 5},
    "columns-permuted": {"placements": columns, "rank_order": "reversed"},
}


def make_samples(count: int = 12, seed: int = 0) -> list[Sample]:
    """Ragged samples; one has no trained token, one a single prompt token."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        prompt = [rng.randrange(3, 96) for _ in range(1 if i == 1 else rng.randint(2, 9))]
        response = [rng.randrange(3, 96) for _ in range(rng.randint(1, 14))]
        samples.append(
            Sample(
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=[i != 2 and rng.random() < 0.9 for _ in response],
                advantages=[rng.uniform(-1, 1) for _ in response],
            )
        )
    return samples


class PolicyGradient:
    """-Σ A log p / count - 0.01 Σ entropy / count over the trained tokens."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.count = sum(sum(sample.loss_mask) for sample in samples)

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
        total = -(micro.advantages * logprobs)
        if entropy is not None:
            total = total - 0.01 * entropy
        loss = torch.where(micro.loss_mask, total, 0.0).sum() / self.count
        return LossResult(loss, {"loss": loss, "tokens": micro.loss_mask.sum()})


def train_all(world: World, path: Path) -> dict[str, dict[str, Any]]:
    """Every cut, one after the other; results by name."""
    return {name: train(world, path, dict(changes)) for name, changes in CUTS.items()}


def train(world: World, path: Path, changes: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """A few optimizer steps on this rank's share; what a test compares, the same on all ranks."""
    import torch.distributed as dist

    kwargs = {key: changes.pop(key) for key in ("placements", "rank_order", "with_entropy") if key in changes}
    if kwargs.get("rank_order") == "reversed":
        kwargs["rank_order"] = list(reversed(range(world.size)))
    config = replace(TRAIN, **changes)
    engine = FSDPEngine(path, config, world=world, temperature=TEMPERATURE, total_steps=STEPS, **kwargs)
    samples = make_samples()
    mine = samples[world.rank :: world.size]
    losses, norms, seen, first = [], [], [], None
    for _ in range(steps):
        scored = engine.logprobs(mine)
        first = first or scored
        metrics, logprobs = engine.forward_backward(mine, PolicyGradient(samples), collect_logprobs=True)
        assert logprobs is not None
        seen.append(max(abs(a - b) for x, y in zip(scored, logprobs, strict=True) for a, b in zip(x, y, strict=True)))
        loss = torch.tensor(metrics["loss"])
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(engine.optimizer_step()["grad_norm"])
    assert engine.version == steps
    return {
        "losses": losses,
        "norms": norms,
        "logprobs": in_order(logprobs, world, len(samples)),
        "first_logprobs": in_order(first, world, len(samples)),
        "scored_against_seen": max(seen),
        "params": {name: full.clone() for name, full in engine.full_parameters()},
    }


def in_order(mine: Any, world: World, total: int) -> list[Any]:
    """This rank's per-sample values with everyone else's, in sample order."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, mine)
    ordered: list[Any] = [None] * total
    for rank, part in enumerate(gathered):
        ordered[rank :: world.size] = part
    return ordered


def reference(path: Path, config: TrainConfig, *, entropy: bool = False) -> dict[str, Any]:
    """The same steps with transformers and torch.optim alone: one process, one sequence at a time, no packing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    samples = make_samples()
    count = sum(sum(s.loss_mask) for s in samples)
    losses, norms, logprobs = [], [], []
    for lr in [1e-2, 0.5e-2, 0.0]:  # one warm-up step, which is the peak, then linear to 0 over 3 steps
        total, logprobs = torch.zeros(()), []
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            log_p = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, -1)[len(sample.prompt_ids) - 1 : -1]
            picked = log_p.gather(1, torch.tensor(sample.response_ids)[:, None]).squeeze(1)
            logprobs.append(picked.tolist())
            value = -torch.tensor(sample.advantages) * picked
            if entropy:
                value = value + 0.01 * (log_p.exp() * log_p).sum(-1)
            total = total + value[torch.tensor(sample.loss_mask)].sum() / count
        total.backward()
        losses.append(total.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    params = dict(model.named_parameters())
    return {"losses": losses, "norms": norms, "logprobs": logprobs, "params": params}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for mine, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=tolerance)
    assert list(found["params"]) == list(expected["params"])
    for name, value in expected["params"].items():
        torch.testing.assert_close(
            found["params"][name], value.detach(), atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tied", "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(qwen2: Path) -> dict[str, Any]:
    return reference(qwen2, TRAIN)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["world1", "world2", "world4"])
def trained(request: pytest.FixtureRequest, qwen2: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(request.param, train_all, qwen2)[0]


@pytest.mark.parametrize("cut", CUTS)
def test_equals_plain_transformers(trained: dict[str, Any], expected: dict[str, Any], cut: str) -> None:
    assert trained[cut]["scored_against_seen"] <= 1e-6
    assert_same(trained[cut], expected)


def test_packed_equals_padded_to_rounding(trained: dict[str, Any]) -> None:
    """First step: the same weights, so nothing but the attention path differs."""
    packed, padded = trained["packed"], trained["padded"]
    assert packed["losses"][0] == pytest.approx(padded["losses"][0], abs=1e-6)
    for mine, theirs in zip(packed["first_logprobs"], padded["first_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)
