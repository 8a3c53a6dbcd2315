"""Disaggregated placement: some ranks train, the others generate; weights and trajectories travel between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.layout import RolloutLayout
from hybridengine.distributed.mailbox import Mailbox
from hybridengine.distributed.pools import TRAIN, Pools
from hybridengine.distributed.world import replica_group
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.placement.parts import (
    EngineOptions,
    describe_checkpoint,
    plan_transfer,
    rollout_shard_map,
    start_rollout,
    start_train,
    transfer_settings,
)
from hybridengine.rewards.scorer import Scorer
from hybridengine.sampling import training_params
from hybridengine.schedule.recorder import recorder_of
from hybridengine.schedule.worker import RolloutWorker
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.transfer.base import WeightTransfer
from hybridengine.sync.transfer.registry import make_transfer


@dataclass(slots=True, kw_only=True)
class PoolEngines:
    """This rank's engine, and its end of the transfer."""

    train: TrainEngine | None
    rollout: RolloutEngine | None
    transfer: WeightTransfer


def build_pool_engines(
    config: Config,
    pools: Pools,
    options: EngineOptions,
    *,
    log_rank0: Callable[[str], None] = lambda text: None,
) -> PoolEngines:
    """Collective over the job: both pools start their engines at the same time, then plan the transfer between them."""
    train: TrainEngine | None = None
    rollout: RolloutEngine | None = None
    awake = replace(config, rollout=replace(config.rollout, sleep_level=0))  # nobody needs the memory meanwhile
    with agree("starting the engines", pools.weights):
        if pools.role == TRAIN:
            train = start_train(config, pools.world, options)
        else:
            rollout = start_rollout(awake, pools.world, options)
    params, _ = describe_checkpoint(options.model_path, trust_remote_code=config.model.trust_remote_code)
    slices: Sequence[Any] = ()
    held: dict[str, str] = {}
    with agree("describing the training layout", pools.weights):
        if train is not None:
            layout = train.shard_map()
            slices = layout.ranks[pools.world.rank]
            held = {piece.tensor: layout.dtype[piece.param] for piece in slices}
    source = gather_shard_map(slices, params, held, group=pools.weights)
    target = rollout_shard_map(rollout, params, group=pools.weights)
    plan = plan_transfer(source, target, group=pools.weights)
    settings = transfer_settings(config, pools.job, group=pools.weights, disaggregated=True)
    log_rank0(f"placement: {pools.train_ranks} training rank(s), {pools.rollout_ranks} rollout rank(s)")
    transfer = make_transfer(config.sync.method, train, rollout, plan, settings, log_rank0=log_rank0)
    dist.barrier(group=pools.weights)
    return PoolEngines(train=train, rollout=rollout, transfer=transfer)


def leaders(pools: Pools, tp: int) -> list[int]:
    """Ranks of the job that lead a replica of the rollout pool."""
    return [pools.train_ranks + rank for rank in RolloutLayout(pools.rollout_ranks, tp).leaders]


def serve(config: Config, pools: Pools, engines: PoolEngines, scorer: Scorer) -> None:
    """Run the rollout pool's side until the training pool ends the run."""
    assert engines.rollout is not None
    world, layout = pools.world, RolloutLayout(pools.world.size, config.rollout.tp)
    is_leader = layout.is_leader(world.rank)
    limit = config.distributed.timeout_seconds
    mailbox = Mailbox(pools.messages, [0], limit=64, timeout_seconds=limit) if is_leader else None
    scorer.stand_in_for(layout.tp)
    worker = RolloutWorker(
        engines.rollout, engines.transfer, scorer, params=training_params(config), seed=config.seed,
        max_num_seqs=config.rollout.max_num_seqs, mailbox=mailbox, group=replica_group(world, layout.tp),
        weights_group=pools.weights, recorder=recorder_of(config, layout.replica_of(world.rank), writes=is_leader),
    )  # fmt: skip
    try:
        worker.run()
    finally:
        scorer.close()
        if mailbox is not None:
            mailbox.close()
        engines.transfer.close()
        engines.rollout.close()
