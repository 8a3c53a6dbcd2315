"""Colocated placement: both engines on every rank, with shards that nest and a handoff between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.owners import make_residency
from hybridengine.memory.phases import Phases
from hybridengine.placement.engines import (
    describe_checkpoint,
    handoff_settings,
    plan_handoff,
    rollout_shard_map,
    start_rollout,
    start_train,
)
from hybridengine.sync.manager import ShardingManager
from hybridengine.sync.plan.nesting import choose_fsdp_sharding
from hybridengine.sync.transfer.base import WeightHandoff
from hybridengine.sync.transfer.registry import make_handoff
from hybridengine.tracing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class Engines:
    """The two engines and what moves weights between them."""

    train: TrainEngine
    rollout: RolloutEngine
    handoff: WeightHandoff


def build_engines(
    config: Config,
    world: World,
    *,
    model_path: Path,
    max_model_len: int,
    total_steps: int,
    eos_token_ids: Sequence[int],
    with_entropy: bool,
    reference: bool,
    say: Callable[[str], None],
) -> Engines:
    """Collective. The rollout engine first: the trainer's shards are chosen to nest inside its own.

    Args:
        max_model_len: tokens of the longest sequence.
        total_steps: optimizer steps of the run.
        say: prints one line about a choice, once.
    """
    with agree("starting the rollout engine"):
        rollout = start_rollout(
            config, world, model_path=model_path, max_model_len=max_model_len, eos_token_ids=eos_token_ids
        )
    params, stored = describe_checkpoint(model_path, trust_remote_code=config.model.trust_remote_code)
    target = rollout_shard_map(rollout, params)
    cut: dict[str, Any] = {}  # megatron's layout follows from its degrees alone
    if config.train.engine == "fsdp" and config.train.shard_order == "auto" and world.size > 1:
        choice = choose_fsdp_sharding(params, target, tp=config.rollout.tp, stored=stored)
        cut = {"placements": lambda name, shape: choice.dims.get(name, 0), "rank_order": choice.order}
        say(choice.explain())
    train = start_train(
        config, world, model_path=model_path, total_steps=total_steps, with_entropy=with_entropy, reference=reference,
        **cut,
    )  # fmt: skip
    plan = plan_handoff(train.shard_map(), target)
    leave = config.memory.offload_weights and (world.is_cuda or config.memory.offload_dir is not None)
    handoff = make_handoff(
        config.handoff.method, train, rollout, plan, handoff_settings(config, world, weights_leave=leave)
    )
    say(f"handoff: {handoff.method}\n{plan.explain()}")
    if shared := getattr(handoff, "bytes_aliased", 0):
        say(f"  aliased: {shared / 1e9:.3f} GB of a rank's rollout weights are the trainer's own memory")
    return Engines(train=train, rollout=rollout, handoff=handoff)


def time_share(
    config: Config, world: World, engines: Engines, timer: PhaseTimer, *, say: Callable[[str], None]
) -> ShardingManager:
    """The mode switch between the two engines, with their memory moving between the phases."""
    residency = make_residency(
        config, train=engines.train, rollout=engines.rollout, world=world, aliased=engines.handoff.aliases, say=say
    )
    phases = Phases.over(residency, timer, world.device)
    return ShardingManager(engines.train, engines.rollout, engines.handoff, phases=phases, world=world, say=say)
