"""Kernels that store weights their own way, in the real vLLM: what is only moved is learnt, synced and served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.plan.spec import ParamSpec
from hybridengine.sync.transfer.base import NoEngine, TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.sync.weight_sync import WeightSync
from tests.distributed.ranks import run_ranks
from tests.engines.contract import NAMES, failures_by_check, run_contract
from tests.engines.subject import Subject, make_models
from tests.tiny import make_tiny

pytestmark = pytest.mark.engine


def shuffled(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def halves_exchanged(size: int) -> Tensor:
    return torch.arange(size).roll(size // 2)


def rearrange_linear_layers() -> None:
    """From now on, vLLM's plain linear method stores some layers' weights otherwise, and its forward undoes that.

    qkv_proj: rows shuffled, bias and all, in other memory. gate_up_proj: halves exchanged, in a parameter of another
    class. o_proj: halves of the columns exchanged, in place. down_proj: transposed, with three rows of padding.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method: Any = UnquantizedLinearMethod
    process, apply = method.process_weights_after_loading, method.apply

    def stores(self: Any, layer: Any) -> None:
        match layer.prefix.rpartition(".")[2]:
            case "qkv_proj":
                order = shuffled(len(layer.weight))
                layer.weight.data, layer.bias.data = layer.weight.data[order], layer.bias.data[order]
            case "gate_up_proj":
                weight = layer.weight.data[halves_exchanged(len(layer.weight))]
                layer.weight = nn.Parameter(weight, requires_grad=False)
            case "o_proj":
                layer.weight.data.copy_(layer.weight.data[:, halves_exchanged(layer.weight.shape[1])].clone())
            case "down_proj":
                weight = nn.functional.pad(layer.weight.data.t(), (0, 0, 0, 3)).contiguous()
                layer.weight = nn.Parameter(weight, requires_grad=False)
                return  # nothing of vLLM's is packed
        process(self, layer)

    def multiplies(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        match layer.prefix.rpartition(".")[2]:
            case "qkv_proj":
                out = apply(self, layer, x, bias)
                return out[..., shuffled(out.shape[-1]).argsort()]
            case "gate_up_proj":
                out = apply(self, layer, x, bias)
                return out[..., halves_exchanged(out.shape[-1]).argsort()]
            case "o_proj":
                return apply(self, layer, x[..., halves_exchanged(x.shape[-1])].contiguous(), bias)
            case "down_proj":
                return nn.functional.linear(x, layer.weight[: x.shape[-1]].t(), bias)
        return apply(self, layer, x, bias)

    method.process_weights_after_loading, method.apply = stores, multiplies


def every_linear_layer_is_rearranged(s: Subject) -> None:
    kinds = {name.split(".")[-2] for name in s.engine._processing.rearranged}
    assert kinds == {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    stored = s.engine.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert stored.shape == (48 + 3, 128) and not stored[48:].any(), "padding stays what it was"


class Shards(NoEngine):
    """The training side: both sets of weights, as one rank of FSDP holds them."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in weights.items()}
        self.local_tensors = self.tensors.copy


def a_transfer_writes_into_it(s: Subject) -> None:
    """The ordinary pull along the ordinary plan, proven by fingerprints of both sides."""
    params = {name: ParamSpec(name, tuple(tensor.shape), "float32") for name, tensor in s.weights[0].items()}
    train = Shards(s.weights[1])
    target = gather_shard_map(s.layout, params, dict.fromkeys(s.engine.live_tensors(), "float32"))
    plan = build_plan(fsdp_shard_map(params, 1, dtype="float32"), target)
    transfer = make_transfer("pull", train, s.engine, plan, TransferSettings(world=s.world, weights_leave=True))
    sync = WeightSync.into(s.engine, transfer)
    for which in (1, 0):
        for name, tensor in train.tensors.items():
            tensor.copy_(s.weights[which][name])
        s.version += 1
        sync.run(s.version)
        s.check_serves(which)
    transfer.close()


OWN = (every_linear_layer_is_rearranged, a_transfer_writes_into_it)


def rearranged_contract(world: World, paths: list[str]) -> dict[str, str]:
    rearrange_linear_layers()
    return run_contract(world, "vllm", 1, paths, {"engine_kwargs": {"block_size": 32}}, OWN)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = make_models(tmp_path_factory.mktemp("models"), "qwen2", {"hidden_size": 128})
    return dict(failures_by_check(run_ranks(1, rearranged_contract, paths, timeout=240)))


@pytest.mark.parametrize("check", [*NAMES, *(check.__name__ for check in OWN)])
def test_contract(failures: dict[str, str], check: str) -> None:
    assert check not in failures, failures[check]


# -- what is refused ---------------------------------------------------------------------------------------------------


def scales(layer: Any) -> None:
    layer.weight.data.mul_(1.5)


def keeps_a_copy(layer: Any) -> None:
    layer.transposed = layer.weight.data.t().contiguous()


def refused(world: World, path: Path) -> list[str]:
    """What the start says of a kernel that scales its weights, and of one that keeps another copy of them."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from hybridengine.engines.rollout.vllm.engine import VLLMEngine

    method: Any = UnquantizedLinearMethod
    process, told = method.process_weights_after_loading, []

    def processing(change: Callable[[Any], None]) -> Callable[..., None]:
        def processes(self: Any, layer: Any) -> None:
            if layer.prefix.endswith("1.mlp.down_proj"):
                change(layer)
            process(self, layer)

        return processes

    for change in (scales, keeps_a_copy):
        method.process_weights_after_loading = processing(change)
        with pytest.raises(ValueError) as caught:
            VLLMEngine(path, RolloutConfig(kv_cache_gib=0.01), world=world, max_model_len=32)
        told.append(str(caught.value))
    dist.barrier()
    return told


def test_what_is_more_than_moved_is_refused_by_name_before_anything_is_served(tmp_path: Path) -> None:
    ((scaled, copied),) = run_ranks(1, refused, make_tiny(tmp_path / "model", hidden_size=128), timeout=120)
    layer = "rollout.engine=vllm: model.layers.1.mlp.down_proj"
    assert scaled.startswith(f"{layer}.weight is not only rearranged: its kernel computes with it, so a weight sync")
    assert copied.startswith(f"{layer}.transposed is a tensor that its kernel derives from loaded weights, so a weight")
