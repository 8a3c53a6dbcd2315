"""The balancing loss of both engines against transformers' formula, however ranks and micro-batches cut the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.balancing import LoadBalance, check_balancing
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.engines.train.megatron.engine import MegatronEngine
from tests.distributed.engines.train.fsdp.test_engine import TEMPERATURE, PolicyGradient, make_samples
from tests.distributed.engines.train.megatron.test_engine import close, share, split_experts, total
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

COEF, EXPERTS, TOP_K = 0.5, 4, 2
#: With this epsilon Adam's first step is the gradient itself, g / (|g| + 1): weights tell what the gradient was.
TRAIN = TrainConfig(
    lr=1.0, eps=1.0, max_grad_norm=0.0, moe_balancing="aux_loss", moe_balancing_coef=COEF,
    max_tokens_per_micro_batch=1000,
)  # fmt: skip
SP, SMALL = {"tp": 2, "sequence_parallel": True}, {"max_tokens_per_micro_batch": 30}
#: (ranks, changes of TRAIN) by name. 20 samples make one or about a dozen micro-batches.
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "megatron": (1, {"engine": "megatron"}),
    "megatron-small": (1, {"engine": "megatron", **SMALL}),
    "megatron-padded-recomputing": (
        1, {"engine": "megatron", "packing": False, "max_tokens_per_micro_batch": 60, "activation_checkpointing": True}
    ),
    "fsdp-small": (1, SMALL),
    "fsdp-padded-recomputing": (
        1, {"packing": False, "max_tokens_per_micro_batch": 60, "activation_checkpointing": True}
    ),
    "dp2": (2, {"engine": "megatron", **SMALL}),
    "ep2": (2, {"engine": "megatron", "ep": 2}),
    "tp2": (2, {"engine": "megatron", **SP, **SMALL}),
    "pp2": (2, {"engine": "megatron", "pp": 2, **SMALL}),
    "fsdp2": (2, SMALL),
    "fsdp2-resharding": (2, {"reshard_after_forward": True, "activation_checkpointing": True, **SMALL}),
    "tp2-ep2": (4, {"engine": "megatron", **SP, "ep": 2}),
    "pp2-vpp2-dp2": (4, {"engine": "megatron", "pp": 2, "vpp": 2, **SMALL}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second without experts."""
    return make_tiny(
        tmp_path_factory.mktemp("balancing") / "qwen3-moe", "qwen3_moe", head_dim=16, num_hidden_layers=4,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[1], std=0.3,
    )  # fmt: skip


def samples_of_the_step() -> list[Any]:
    return make_samples(20)


def plain(path: Path, coef: float) -> dict[str, Any]:
    """Transformers and torch.optim, one sequence at a time; the loss of all layers' logits as transformers has it.

    It counts a token once per chosen expert, so its loss is ``TOP_K`` for a balanced layer, where ours is 1.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    logits: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda module, args, output, index=index: logits.setdefault(index, []).append(output[0])
            )
    samples = samples_of_the_step()
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        rows = torch.log_softmax(model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE, -1)
        picked = rows.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        chosen = torch.tensor(sample.loss_mask)
        loss = loss - (torch.tensor(sample.advantages) * picked)[chosen].sum() / PolicyGradient(samples).count
    layers = [torch.cat(parts) for parts in logits.values()]
    balance = [load_balancing_loss_func((layer,), EXPERTS, TOP_K) / TOP_K for layer in layers]
    (loss + coef * sum(balance)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, betas=(0.9, 0.999), weight_decay=0.0)
    optimizer.step()
    loads = [torch.bincount(layer.topk(TOP_K).indices.flatten(), minlength=EXPERTS) for layer in layers]
    return {
        "loss": loss.item(),
        "norm": norm.item(),
        "params": split_experts(path, dict(model.named_parameters())),
        "moe/load_balancing_loss": sum(balance).item() / len(balance),
        "moe/max_expert_load": max((load.max() / load.float().mean()).item() for load in loads),
    }


def make_engine(world: World, path: Path, changes: dict[str, Any], steps: int = 1) -> Any:
    train = replace(TRAIN, **changes)
    kind = MegatronEngine if train.engine == "megatron" else FSDPEngine
    return kind(path, train, world=world, temperature=TEMPERATURE, total_steps=steps)


def step(world: World, path: Path, cuts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, changes in cuts.items():
        engine, samples = make_engine(world, path, changes), samples_of_the_step()
        mine = share(engine, samples)
        engine.logprobs(mine)
        metrics, _ = engine.forward_backward(mine, PolicyGradient(samples))
        numbers = engine.optimizer_step()
        found[name] = numbers | {
            "loss": total(metrics["loss"]),
            "norm": numbers["grad_norm"],
            "params": {key: full.clone() for key, full in engine.full_parameters()},
        }
    return found


@pytest.fixture(scope="module")
def stepped(model: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        cuts = {name: changes for name, (count, changes) in CUTS.items() if count == ranks}
        found |= run_ranks(ranks, step, model, cuts, timeout=280)[0]
    return found


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Any]:
    return plain(model, COEF)


@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_is_that_of_the_formula(stepped: dict[str, Any], expected: dict[str, Any], cut: str) -> None:
    """The reported loss is the policy's alone; norm and weights show the sum of both gradients."""
    found = stepped[cut]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    close(found["params"], expected["params"], 2e-6)
    for name in ("moe/load_balancing_loss", "moe/max_expert_load"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_the_formula_makes_a_difference(model: Path, expected: dict[str, Any]) -> None:
    """What the test above tells apart: a hundredth of the coefficient moves a router by ten times its tolerance."""
    name = "model.layers.0.mlp.gate.weight"
    other = plain(model, COEF * 0.99)["params"][name]
    assert (other - expected["params"][name]).abs().max() > 2e-5
    assert expected["moe/load_balancing_loss"] > 1.02


def loads_over_steps(world: World, path: Path, coef: float) -> list[dict[str, float]]:
    changes = {"engine": "megatron", "lr": 1e-2, "eps": 1e-8, "moe_balancing_coef": coef}
    engine, samples, found = make_engine(world, path, changes, steps=8), samples_of_the_step(), []
    for _ in range(8):
        engine.forward_backward(samples, PolicyGradient(samples))
        found.append(engine.optimizer_step())
    return found


def test_the_coefficient_evens_out_the_load(model: Path) -> None:
    pulled, measured = (run_ranks(1, loads_over_steps, model, coef)[0] for coef in (COEF, 0.0))
    name = "moe/load_balancing_loss"
    assert pulled[0][name] == pytest.approx(measured[0][name], rel=1e-6)
    assert pulled[-1][name] - 1 < 0.5 * (pulled[0][name] - 1)
    assert pulled[-1][name] < measured[-1][name]
    assert pulled[-1]["moe/max_expert_load"] < measured[-1]["moe/max_expert_load"]


def config_of(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def test_what_routers_can_not_have_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="moe_balancing=bias.*no tensor for a bias per expert.*use aux_loss"):
        check_balancing(TrainConfig(moe_balancing="bias"), config_of(model))
    dense = config_of(make_tiny(tmp_path / "dense", "qwen2"))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no experts to balance; use none"):
        LoadBalance.of(TRAIN, dense, torch.device("cpu"))
    assert LoadBalance.of(TrainConfig(), dense, torch.device("cpu")) is None
