"""Value models on both training engines against plain transformers: values, losses, gradients' norms, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybridengine.algorithms.critic import Critic
from hybridengine.algorithms.losses import LossCounts
from hybridengine.config import CriticConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.engines.train.megatron.engine import MegatronEngine
from hybridengine.types import Sample
from tests.distributed.engines.train.fsdp.test_engine import STEPS, TRAIN, PolicyGradient, make_samples
from tests.distributed.ranks import RankFailure, run_ranks
from tests.tiny import make_tiny

SMALL = {"max_tokens_per_micro_batch": 24}
CUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp1": (1, "fsdp", {}),
    "fsdp1-padded": (1, "fsdp", {"packing": False, "max_tokens_per_micro_batch": 60}),
    "fsdp2-small": (2, "fsdp", SMALL),
    "fsdp2-recompute": (2, "fsdp", {"reshard_after_forward": True, "activation_checkpointing": True}),
    "fsdp4": (4, "fsdp", SMALL),
    "megatron1": (1, "megatron", {}),
    "megatron-dp2-padded": (2, "megatron", {"packing": False, "max_tokens_per_micro_batch": 60}),
    "megatron-tp2": (2, "megatron", {"tp": 2}),
    "megatron-tp2-sp": (2, "megatron", {"tp": 2, "sequence_parallel": True}),
    "megatron-pp2": (2, "megatron", {"pp": 2, **SMALL}),
    "megatron-tp2-pp2": (4, "megatron", {"tp": 2, "pp": 2, **SMALL}),
}
CLIP = 0.2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``plain``: a causal language model; ``headed``: the same weights with a random head, tied."""
    root = tmp_path_factory.mktemp("values")
    plain = make_tiny(root / "plain", "qwen2", tie_word_embeddings=True)
    headed = make_tiny(root / "headed", "qwen2", tie_word_embeddings=True)
    weights = load_file(headed / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    save_file(
        weights | {"score.weight": torch.randn(1, 32, generator=generator) * 0.3},
        headed / "model.safetensors",
        metadata={"format": "pt"},
    )
    return {"plain": plain, "headed": headed}


def critic_samples() -> list[Sample]:
    """With values of an older critic and returns, some of them further away than the clip."""
    samples = make_samples()
    for sample in samples:
        sample.values = [0.3 * a for a in sample.advantages]
        sample.returns = [1.0 - a for a in sample.advantages]
    return samples


def reference(path: Path) -> dict[str, Any]:
    """Transformers and torch.optim alone: one process, one sequence at a time, the formula written out."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", num_labels=1
    ).eval()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": TRAIN.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps)
    samples = critic_samples()
    count = sum(sum(s.loss_mask) for s in samples)
    found: dict[str, Any] = {"losses": [], "norms": [], "values": []}
    for lr in [1e-2, 0.5e-2, 0.0]:
        total, values = torch.zeros(()), []
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            v = model.score(model.model(ids).last_hidden_state)[0, len(sample.prompt_ids) - 1 : -1, 0]
            old, returns = torch.tensor(sample.values), torch.tensor(sample.returns)
            clipped = old + (v - old).clamp(-CLIP, CLIP)
            losses = 0.5 * torch.maximum((v - returns) ** 2, (clipped - returns) ** 2)
            total = total + losses[torch.tensor(sample.loss_mask)].sum() / count
            values.append(v.tolist())
        total.backward()
        found["losses"].append(total.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.max_grad_norm).item())
        found["values"].append(values)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return found | {"params": {name: p.detach() for name, p in model.named_parameters()}}


def make_engine(world: World, engine: str, path: Path, changes: dict[str, Any], **kwargs: Any) -> Any:
    config = replace(TRAIN, engine=engine, **changes)
    return {"fsdp": FSDPEngine, "megatron": MegatronEngine}[engine](
        path, config, world=world, total_steps=STEPS, head="value", **kwargs
    )


def everyone(engine: Any, mine: Sequence[Any], total: int) -> list[Any]:
    """By sample, what each replica has of its share."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(zip(range(engine.replica, total, engine.num_replicas), mine, strict=True)))
    return [next(part[i] for part in parts if i in part) for i in range(total)]


def train_cuts(world: World, path: Path, cuts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: train(world, path, engine, changes) for name, (_, engine, changes) in cuts.items()}


def train(world: World, path: Path, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(world, name, path, changes)
    critic, samples = Critic(engine, CriticConfig(clip=CLIP)), critic_samples()
    mine = samples[engine.replica :: engine.num_replicas]
    found: dict[str, Any] = {"losses": [], "norms": [], "values": []}
    for _ in range(STEPS):
        found["values"].append(everyone(engine, engine.values(mine), len(samples)))
        sums, _ = engine.forward_backward(mine, critic.loss_fn(LossCounts.of(samples)))
        last = engine.optimizer_step()
        found["losses"].append(critic.metrics([sums], last)["critic/loss"])
        found["norms"].append(last["grad_norm"])
    return found | {"params": {key: full.clone() for key, full in engine.full_parameters()}}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Any]:
    return reference(models["headed"])


@pytest.fixture(scope="module")
def trained(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        cuts = {name: cut for name, cut in CUTS.items() if cut[0] == ranks}
        found |= run_ranks(ranks, train_cuts, models["headed"], cuts)[0]
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_equals_plain_transformers(trained: dict[str, Any], expected: dict[str, Any], cut: str) -> None:
    found = trained[cut]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for mine, theirs in zip(found["values"], expected["values"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    assert set(found["params"]) == set(expected["params"])
    for name, value in expected["params"].items():
        torch.testing.assert_close(found["params"][name], value, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def life(world: World, paths: dict[str, Path], directory: Path) -> dict[str, Any]:
    """A critic from a language model: zero values; then trained, saved, exported, and gone on from on both engines."""
    samples = critic_samples()
    found: dict[str, Any] = {}

    def step(engine: Any) -> float:
        critic, mine = Critic(engine, CriticConfig(clip=CLIP)), samples[engine.replica :: engine.num_replicas]
        sums, _ = engine.forward_backward(mine, critic.loss_fn(LossCounts.of(samples)))
        return critic.metrics([sums], engine.optimizer_step())["critic/loss"]

    engine = make_engine(world, "fsdp", paths["plain"], {})
    found["zeros"] = {value for row in engine.values(samples) for value in row}
    step(engine)
    engine.save(directory / "fsdp")
    engine.export(directory / "exported")
    found["next"] = step(engine)
    for name, changes in (("fsdp", SMALL), ("megatron", {"tp": 2}), ("megatron", {"pp": 2})):
        other = make_engine(world, name, paths["plain"], changes)
        other.load(directory / "fsdp")
        if name == "megatron":
            other.save(directory / "-".join(changes))
            other.export(directory / "-".join(("exported", *changes)))
        found[f"resumed {name} {'-'.join(changes)}"] = step(other)
    back = make_engine(world, "fsdp", paths["plain"], {})
    back.load(directory / "tp")
    found["resumed from megatron"] = step(back)
    return found


def test_one_life(models: dict[str, Path], tmp_path: Path) -> None:
    found = run_ranks(2, life, models, tmp_path)[0]
    assert found.pop("zeros") == {0.0}
    after = found.pop("next")
    assert {name: value for name, value in found.items() if value != pytest.approx(after, abs=1e-6)} == {}
    from transformers import AutoModelForSequenceClassification

    exported = [
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("exported", "exported-tp", "exported-pp")
    ]
    assert exported[0]["score.weight"].shape == (1, 32) and exported[0]["score.weight"].abs().max() > 0
    for other in exported[1:]:
        for name, value in exported[0].items():
            torch.testing.assert_close(other[name], value, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def both_in_megatron(world: World, paths: dict[str, Path]) -> dict[str, list[float]]:
    """Two steps of a policy alone, and again with a critic that learns in between."""
    samples, changes = critic_samples(), {"tp": 2, "engine": "megatron"}
    found: dict[str, list[float]] = {}
    for name in ("alone", "beside"):
        policy = MegatronEngine(paths["plain"], replace(TRAIN, **changes), world=world, total_steps=STEPS)
        critic = make_engine(world, "megatron", paths["headed"], {"tp": 2}) if name == "beside" else None
        found[name] = []
        for _ in range(2):
            if critic is not None:
                values = critic.values(samples)
                assert max(abs(v) for row in values for v in row) > 0.01
                loss_fn = Critic(critic, CriticConfig(clip=CLIP)).loss_fn(LossCounts.of(samples))
                found.setdefault("critic", []).append(critic.forward_backward(samples, loss_fn)[0]["loss"])
                critic.optimizer_step()
            found[name].append(policy.forward_backward(samples, PolicyGradient(samples))[0]["loss"])
            found[name].append(policy.optimizer_step()["grad_norm"])
    return found


def test_policy_and_critic_in_megatron_share_groups_and_nothing_else(
    models: dict[str, Path], expected: dict[str, Any]
) -> None:
    found = run_ranks(2, both_in_megatron, models)
    assert found[0]["alone"] == found[0]["beside"] and found[0]["alone"][0] != found[0]["alone"][2]
    # One rank of a replica has its sums.
    assert [sum(r["critic"][i] for r in found) for i in range(2)] == pytest.approx(expected["losses"][:2], abs=1e-5)


def two_labels(world: World, path: Path, head: str) -> None:
    FSDPEngine(path, TrainConfig(), world=world, total_steps=1, head=head)


def test_other_heads_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"no score.weight in it; a reward model is a sequence classifier"):
        run_ranks(1, two_labels, models["plain"], "reward")
    path = make_tiny(tmp_path / "two", "qwen2", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors") | {"score.weight": torch.zeros(2, 32)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankFailure, match=r"score.weight has shape \(2, 32\); a value or reward model has one label"):
        run_ranks(1, two_labels, path, "value")
