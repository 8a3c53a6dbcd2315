"""Ranks with unequal room for their KV caches plan alike, and are refused alike."""

from __future__ import annotations

from typing import Any

import torch

from hybridengine.distributed.world import World
from hybridengine.memory import kv_plan
from hybridengine.memory.kv_plan import RESERVE
from tests.distributed.ranks import run_ranks
from tests.unit.memory.test_kv_plan import MIB, Cache

#: Blocks that each of the two ranks has room for, wake after wake.
ROOM = [(300, 200), (2000, 700), (400, 49), (400, 400)]


def plan_each_wake(world: World) -> list[Any]:
    """Blocks usable after every wake, or who refused."""
    cache, found = Cache(), list[Any]()
    for room in ROOM:
        kv_plan.available_host_memory = lambda room=room: 2 * (RESERVE + room[world.rank] * MIB)
        cache.planned = False
        try:
            kv_plan.plan(cache, world)
            found.append(cache.usable)
        except torch.OutOfMemoryError as error:
            found.append(str(error))
    return found


def test_the_rank_with_the_least_room_decides_for_all() -> None:
    first, second = run_ranks(2, plan_each_wake)
    for found in (first, second):
        assert found[:2] == [200, 700] and found[3] == 400
        assert "takes 50 MiB, and the rank with the least room has 49;" in found[2]
    assert "here 1.78 GiB" in first[2] and "here 1.10 GiB" in second[2]
