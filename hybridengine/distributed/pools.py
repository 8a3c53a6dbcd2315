"""One job, two pools: the ranks split into training and rollout, each a torch.distributed world of its own.

Inside a pool everything is as if the pool were the job: its default group, its ranks 0 .. size-1, its engine. Two
further groups span both pools: one for messages, one for weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from hybridengine.distributed.world import World

TRAIN, ROLLOUT = "train", "rollout"


@dataclass(frozen=True, slots=True)
class Pools:
    """This process's view of a split job.

    Attributes:
        role: TRAIN or ROLLOUT.
        job: its place in the whole job; training ranks come first.
        world: its place in its pool.
        train_ranks, rollout_ranks: sizes of the pools.
        messages, weights: groups over all ranks, numbered as in ``job``.
    """

    role: str
    job: World
    world: World
    train_ranks: int
    rollout_ranks: int
    messages: dist.ProcessGroup
    weights: dist.ProcessGroup


def pool_world(job: World, rollout_ranks: int) -> tuple[str, World]:
    """Role and pool-local World of a rank: the last ``rollout_ranks`` generate. The device stays its own."""
    train_ranks = job.size - rollout_ranks
    if job.rank < train_ranks:
        return TRAIN, replace(job, size=train_ranks, local_size=train_ranks)
    rank = job.rank - train_ranks
    return ROLLOUT, replace(job, rank=rank, size=rollout_ranks, local_size=rollout_ranks)


def split(job: World, rollout_ranks: int, *, timeout_seconds: float) -> Pools:
    """Start torch.distributed in both pools and between them. Collective over the job.

    Messages wait without a limit, as a pool may send nothing for hours; a peer that is gone is noticed by its
    connection. Everything else is bounded by ``timeout_seconds``.
    """
    job.platform.bind(job.device, local_size=job.local_size)
    store = next(iter(dist.rendezvous("env://", job.rank, job.size)))[0]
    role, world = pool_world(job, rollout_ranks)
    # Engines read the environment: to them, the pool is the job.
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_WORLD_SIZE": str(world.local_size)}
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        job.platform.backend,
        store=dist.PrefixStore(role, store), rank=world.rank, world_size=world.size, timeout=timeout,
    )  # fmt: skip
    train_ranks = job.size - rollout_ranks
    return Pools(
        role=role, job=job, world=world, train_ranks=train_ranks, rollout_ranks=rollout_ranks,
        messages=_wide_group("messages", "gloo", store, job, world, timedelta(days=365)),
        weights=_wide_group("weights", job.platform.backend, store, job, world, timeout),
    )  # fmt: skip


def _wide_group(
    name: str, backend: str, store: dist.Store, job: World, world: World, timeout: timedelta
) -> dist.ProcessGroup:
    """A group over the whole job, beside a default group that is narrower: torch has no public call for that.

    torch.distributed translates group ranks through "global" ranks, which here are those of the pool; ranks of the
    other pool get numbers after them.
    """
    from torch.distributed import distributed_c10d as c10d

    group, _ = c10d._new_process_group_helper(
        job.size, job.rank, [], c10d.Backend(backend), dist.PrefixStore(name, store), c10d.GroupName(name),
        timeout=timeout,
    )  # fmt: skip
    first = job.rank - world.rank
    own = list(range(first, first + world.size))
    others = [rank for rank in range(job.size) if rank not in own]
    c10d._world.pg_group_ranks[group] = {number: rank for number, rank in enumerate([*own, *others])}
    return group
