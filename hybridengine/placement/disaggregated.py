"""Disaggregated placement: some ranks train, the others generate; weights and trajectories travel between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.mailbox import Mailbox
from hybridengine.distributed.pools import TRAIN, Pools
from hybridengine.distributed.world import replica_group
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.handoff.base import WeightHandoff
from hybridengine.handoff.registry import make_handoff
from hybridengine.placement.engines import (
    describe_checkpoint,
    handoff_settings,
    plan_handoff,
    rollout_shard_map,
    start_rollout,
    start_train,
)
from hybridengine.reshard.gather import gather_shard_map
from hybridengine.rewards.scorer import Scorer
from hybridengine.schedule.colocated import sampling_params
from hybridengine.schedule.recorder import recorder_of
from hybridengine.schedule.worker import RolloutWorker


class Absent:
    """The engine that this rank does not have: no shards, no live weights."""

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {}


@dataclass(slots=True, kw_only=True)
class Halves:
    """This rank's engine, and its end of the handoff."""

    train: TrainEngine | None
    rollout: RolloutEngine | None
    handoff: WeightHandoff


def build_halves(
    config: Config,
    pools: Pools,
    *,
    model_path: Path,
    max_model_len: int,
    total_steps: int,
    eos_token_ids: Sequence[int],
    with_entropy: bool,
    reference: bool,
    say: Callable[[str], None] = lambda text: None,
) -> Halves:
    """Collective over the job: both pools start their engines at the same time, then plan the handoff between them.

    Arguments as for ``build_engines``.
    """
    train: TrainEngine | None = None
    rollout: RolloutEngine | None = None
    awake = replace(config, rollout=replace(config.rollout, sleep_level=0))  # nobody needs the memory meanwhile
    with agree("starting the engines", pools.weights):
        if pools.role == TRAIN:
            train = start_train(
                config, pools.world, model_path=model_path, total_steps=total_steps, with_entropy=with_entropy,
                reference=reference,
            )  # fmt: skip
        else:
            rollout = start_rollout(
                awake, pools.world, model_path=model_path, max_model_len=max_model_len, eos_token_ids=eos_token_ids
            )
    params, _ = describe_checkpoint(model_path, trust_remote_code=config.model.trust_remote_code)
    slices: Sequence[Any] = ()
    held: dict[str, str] = {}
    with agree("describing the training layout", pools.weights):
        if train is not None:
            layout = train.shard_map()
            slices = layout.ranks[pools.world.rank]
            held = {piece.tensor: layout.dtype[piece.param] for piece in slices}
    source = gather_shard_map(slices, params, held, group=pools.weights)
    target = rollout_shard_map(rollout, params, group=pools.weights)
    plan = plan_handoff(source, target, group=pools.weights)
    settings = handoff_settings(config, pools.job, group=pools.weights, apart=True)
    handoff = make_handoff(config.handoff.method, train or Absent(), rollout or Absent(), plan, settings)
    say(
        f"placement: {pools.train_ranks} training rank(s), {pools.rollout_ranks} rollout rank(s)\n"
        f"handoff: {handoff.method}\n{plan.explain()}"
    )
    dist.barrier(group=pools.weights)
    return Halves(train=train, rollout=rollout, handoff=handoff)


def leaders(pools: Pools, tp: int) -> list[int]:
    """Ranks of the job that speak for a replica: the first of each tensor-parallel group of the rollout pool."""
    return list(range(pools.train_ranks, pools.job.size, tp))


def serve(config: Config, pools: Pools, halves: Halves, scorer: Scorer) -> None:
    """The rollout pool's side of a run, until the training pool says that it is over."""
    assert halves.rollout is not None
    tp, world = config.rollout.tp, pools.world
    speaks = world.rank % tp == 0
    limit = config.distributed.timeout_seconds
    mailbox = Mailbox(pools.messages, [0], limit=64, timeout_seconds=limit) if speaks else None
    scorer.stand_in_for(tp)
    worker = RolloutWorker(
        halves.rollout, halves.handoff, scorer, params=sampling_params(config), seed=config.seed,
        max_num_seqs=config.rollout.max_num_seqs, mailbox=mailbox, group=replica_group(world, tp),
        recorder=recorder_of(config, world.rank // tp, writes=speaks),
    )  # fmt: skip
    try:
        worker.run()
    finally:
        scorer.close()
        if mailbox is not None:
            mailbox.close()
        halves.handoff.close()
        halves.rollout.close()
