"""How much of its KV cache a rollout may use: decided after every wake, from the memory that is free then."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from hybridengine.distributed.world import World
from hybridengine.memory.host import available_host_memory
from hybridengine.memory.tracker import GIB

#: Bytes that each rank keeps for what a rollout needs beside its cache: activations, logits, samples.
RESERVE = GIB // 2


class BlockCache(Protocol):
    """A KV cache in host memory, whose blocks take memory as they are first used, and can be withheld.

    Attributes:
        total: blocks it was built with.
        usable: blocks that can be used now.
        minimum: blocks without which not even one sequence of the longest kind can be generated.
        block_bytes: bytes of one block on this rank.
        planned: nothing of it was given up since the last ``allow``.
    """

    total: int
    usable: int
    minimum: int
    block_bytes: int
    planned: bool

    def allow(self, count: int) -> None:
        """Make the first ``count`` blocks usable and withhold the others. Called while nothing is being generated."""
        ...


def affordable(free: int, *, ranks: int, block_bytes: int, total: int) -> int:
    """Blocks that one of ``ranks`` ranks may use of its ``total``, when ``free`` bytes are there for all of them."""
    return min(total, max(0, free // ranks - RESERVE) // block_bytes)


def plan(cache: BlockCache, world: World) -> None:
    """Collective, unless the plan still holds: every rank may use what the rank with the least room can afford.

    Nothing may move between the last rank's arrival here and its leaving: all must have agreed before that theirs is
    in place, or a rank would count as taken what its neighbour is about to give back.

    Raises:
        torch.OutOfMemoryError: on every rank: it is less than one sequence. The cache keeps its old plan and counts
            as not planned.
    """
    if cache.planned:
        return
    free, ranks = available_host_memory(), world.local_size
    least = torch.tensor([affordable(free, ranks=ranks, block_bytes=cache.block_bytes, total=cache.total)])
    if world.size > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    count = int(least)
    if count < cache.minimum:
        needed, found = (blocks * cache.block_bytes / 2**20 for blocks in (cache.minimum, count))
        raise torch.OutOfMemoryError(
            f"a KV cache for one sequence of rollout.max_model_len tokens takes {needed:.0f} MiB, and the rank with "
            f"the least room has {found:.0f}; here {free / GIB:.2f} GiB of host memory are free for {ranks} rank(s), "
            f"each of which keeps {RESERVE / GIB} GiB for the rest. Free some, shorten rollout.max_model_len, or set "
            "memory.offload_dir for what a rollout does not need"
        )
    cache.allow(count)


def describe(cache: BlockCache) -> str:
    """One line: how much of the cache is usable."""
    part, whole = (count * cache.block_bytes / GIB for count in (cache.usable, cache.total))
    return (
        f"{part:.2f} of {whole:.2f} GiB of KV cache per rank are usable in this rollout: planned after every sync from "
        "the host memory that is free then (memory/kv_cache_usable in the metrics)"
    )
