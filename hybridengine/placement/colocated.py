"""Colocated placement: both engines on every rank, with shards that nest and a transfer between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import TAGS, RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.phases import Phases
from hybridengine.placement.memory import make_residency
from hybridengine.placement.parts import (
    EngineOptions,
    describe_checkpoint,
    plan_transfer,
    rollout_shard_map,
    start_rollout,
    start_train,
    transfer_settings,
)
from hybridengine.platform.base import Mover
from hybridengine.sync.plan.nesting import choose_fsdp_sharding
from hybridengine.sync.sharding import ShardingManager
from hybridengine.sync.transfer.base import WeightTransfer
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.tracing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class Engines:
    """The two engines and what moves weights between them."""

    train: TrainEngine
    rollout: RolloutEngine
    transfer: WeightTransfer


def build_engines(config: Config, world: World, options: EngineOptions, *, log_rank0: Callable[[str], None]) -> Engines:
    """Collective. The rollout engine first: the trainer's shards are chosen to nest inside its own.

    Once its layout is known it gives its memory up, as far as ``rollout.sleep_level`` goes: the trainer is built where
    it was. Nothing is lost, as it holds no weights yet.
    """
    with agree("starting the rollout engine"):
        rollout = start_rollout(config, world, options)
    params, stored = describe_checkpoint(options.model_path, trust_remote_code=config.model.trust_remote_code)
    target = rollout_shard_map(rollout, params)
    with agree("putting the rollout engine to sleep"):
        for tag in reversed(TAGS):
            rollout.sleep((tag,))
        world.platform.release_cached()
    cut: dict[str, Any] = {}  # megatron's layout follows from its degrees alone
    if config.train.engine == "fsdp" and config.train.shard_order == "auto" and world.size > 1:
        choice = choose_fsdp_sharding(params, target, tp=config.rollout.tp, stored=stored)
        cut = {"placements": lambda name, shape: choice.dims.get(name, 0), "rank_order": choice.order}
        log_rank0(choice.explain())
    train = start_train(config, world, options, **cut)
    plan = plan_transfer(train.shard_map(), target)
    leave = config.memory.offload_weights and (
        world.platform.separate_memory or config.memory.offload_dir is not None
    )  # fmt: skip
    settings = transfer_settings(config, world, weights_leave=leave)
    transfer = make_transfer(config.sync.method, train, rollout, plan, settings, log_rank0=log_rank0)
    return Engines(train=train, rollout=rollout, transfer=transfer)


def time_share(
    config: Config,
    world: World,
    engines: Engines,
    timer: PhaseTimer,
    *,
    log_rank0: Callable[[str], None],
    beside: Mapping[str, Mover] | None = None,
) -> ShardingManager:
    """The mode switch between the two engines, with their memory moving between the phases, and that of the models
    ``beside`` them."""
    residency = make_residency(
        config, train=engines.train, rollout=engines.rollout, transfer=engines.transfer, world=world,
        log_rank0=log_rank0, beside=beside,
    )  # fmt: skip
    phases = Phases.over(residency, timer, world.device)
    return ShardingManager(
        engines.train, engines.rollout, engines.transfer, phases=phases, world=world, log_rank0=log_rank0
    )
