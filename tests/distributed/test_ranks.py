"""The helper the other distributed tests stand on: results by rank, and failures that surface."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from hybridengine.distributed.world import World
from tests.distributed.ranks import RankFailure, run_ranks


def _sum(world: World, offset: int) -> float:
    value = torch.tensor(float(world.rank + offset))
    dist.all_reduce(value)
    return value.item()


def _one_fails(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the first failure")
    dist.barrier()


def _one_dies(world: World) -> None:
    if world.rank == 1:
        os._exit(7)
    dist.barrier()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(2, _sum, 10) == [21.0, 21.0]


@pytest.mark.parametrize(
    ("fn", "message"), [(_one_fails, "the first failure"), (_one_dies, "rank 1 exited with code 7")]
)
def test_a_failing_rank_is_reported(fn, message) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, fn)
