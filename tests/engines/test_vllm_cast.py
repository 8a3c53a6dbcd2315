"""Float32 shards into vLLM's own bfloat16 parameters: what vLLM makes of the same checkpoint itself, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridengine.distributed.world import World
from hybridengine.placement.parts import plan_transfer
from hybridengine.sync.plan.bake import bake_vllm
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming import canonical_params
from hybridengine.sync.plan.spec import ParamSpec, ShardMap
from hybridengine.sync.transfer.base import NoEngine, TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.ranks import run_ranks
from tests.engines.test_bake import config_of


def checkpoint(params: dict[str, ParamSpec], version: int) -> dict[str, Tensor]:
    """Float32 weights, most of which bfloat16 rounds."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in params.items()}


class Shards(NoEngine):
    """The training side: this rank's boxes of a checkpoint."""

    def __init__(self, layout: ShardMap, rank: int) -> None:
        self._pieces = layout.ranks[rank]
        self._tensors = {piece.tensor: torch.zeros(piece.sizes) for piece in self._pieces}

    def local_tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def write(self, weights: dict[str, Tensor]) -> None:
        for piece in self._pieces:
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            self._tensors[piece.tensor].copy_(weights[piece.param][box])


class Served(NoEngine):
    """The rollout side: a vLLM model without an engine around it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def live_tensors(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


def cast_into_vllm(world: World, directory: str) -> None:
    """FSDP-2 to TP2, two versions, after weights that vLLM has loaded itself: padding is as it leaves it."""
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of("qwen2")
    params = canonical_params(config)
    with fake_ranks(world.size, world.rank), torch.no_grad():
        model = build_model(Path(directory) / str(world.rank), config, tp=world.size, dtype="bfloat16")
        rollout = Served(model)
        live = rollout.live_tensors()
        assert {tensor.dtype for tensor in live.values()} == {torch.bfloat16}
        slices = bake_vllm(model, params, live)
        model.load_weights(iter(checkpoint(params, 0).items()))
        source = fsdp_shard_map(params, world.size, dtype="float32")
        target = gather_shard_map(slices, params, dict.fromkeys(live, "bfloat16"))
        train = Shards(source, world.rank)
        settings = TransferSettings(world=world, timeout_seconds=60)
        transfer = make_transfer("pull", train, rollout, plan_transfer(source, target), settings)
        for version in (1, 2):
            weights = checkpoint(params, version)
            train.write(weights)
            assert transfer.run(version).bytes_received > 0
            pulled = {name: tensor.clone() for name, tensor in live.items()}
            model.load_weights(iter(weights.items()))
            for name, tensor in live.items():
                assert torch.equal(pulled[name], tensor), (version, name)


@pytest.mark.engine
def test_float32_shards_are_cast_as_vllm_casts_them(tmp_path: Path) -> None:
    run_ranks(2, cast_into_vllm, str(tmp_path), timeout=240)
