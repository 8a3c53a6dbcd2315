"""Which casting copies go through the ring of their owner: pure planning, no processes."""

from __future__ import annotations

import pytest
import torch

from hybridengine.handoff.staging import StagedChunks
from hybridengine.reshard.plan import build_plan
from tests.distributed.layouts import Cut, layout, shard, tensor_parallel


@pytest.mark.parametrize(
    ("target", "shared"),
    [(tensor_parallel(1, 0), {"embed", "norm", "proj", "experts", "tall", "one"}), (shard(1), set())],
    ids=["all-need-all", "others-need-other-parts"],
)
def test_what_owner_and_others_both_need_is_cast_once(target: Cut, shared: set[str]) -> None:
    plan = build_plan(layout(shard(0), 2, "float32"), layout(target, 2, "bfloat16"))
    staged = StagedChunks(plan, 0, 2, 2**20, torch.device("cpu"))
    assert {copy.param for copy in staged.shared} == shared
    assert staged.kept == sum(copy.nbytes for copy in staged.shared)
    items = [item for chunk in staged._chunks[0] for item in chunk.items]
    assert sum(len(item.copies) for item in items) == len(plan.sends(0)) + len(staged.shared)
    assert all(len({copy.source for copy in item.copies}) == 1 for item in items)


def test_no_cast_no_ring() -> None:
    plan = build_plan(layout(shard(0), 2, "float32"), layout(tensor_parallel(1, 0), 2, "float32"))
    staged = StagedChunks(plan, 0, 2, 2**20, torch.device("cpu"))
    assert not staged.nbytes and not staged.shared and not staged.rounds
