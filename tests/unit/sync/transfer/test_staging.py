"""Which casting copies go through the ring of their owner: pure planning, no processes."""

from __future__ import annotations

import pytest
import torch

from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.chunks import cut
from hybridengine.sync.transfer.region import ALIGNMENT
from hybridengine.sync.transfer.staging import StagedChunks
from tests.distributed.layouts import (
    MIXED_SOURCE,
    MIXED_TARGET,
    Cut,
    layout,
    only,
    shard,
    tensor_parallel,
)


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


def test_dtypes_side_by_side_in_a_chunk() -> None:
    """bfloat16 [3] ends at byte 6; float32 [5] begins at byte 64 and ends at 84; the chunk is 2 * 64 bytes."""
    shapes, dtypes = {"a": (3,), "b": (5,)}, {"a": "bfloat16", "b": "float32"}
    source = layout(only({0}), 2, "float32", shapes=shapes)
    plan = build_plan(source, layout(only({1}), 2, dtypes, shapes=shapes))
    (chunk,) = cut(plan.sends(0), 2**20, share=False)
    assert [(item.offset, item.nbytes, item.copies[0].param) for item in chunk.items] == [(0, 6, "a"), (64, 20, "b")]
    assert chunk.nbytes == 128


def test_chunks_of_mixed_engines_are_aligned_and_do_not_overlap() -> None:
    plan = build_plan(layout(shard(0), 2, MIXED_SOURCE), layout(tensor_parallel(1, 0), 2, MIXED_TARGET))
    mixed = 0
    for chunk in cut(plan.sends(0), 256, share=False):
        mixed += len({item.copies[0].target_dtype for item in chunk.items}) > 1
        ends = [item.offset + item.nbytes for item in chunk.items]
        begins = [item.offset for item in chunk.items[1:]]
        assert all(item.offset % ALIGNMENT == 0 for item in chunk.items)
        assert all(end <= begin for end, begin in zip(ends, begins, strict=False)) and ends[-1] <= chunk.nbytes <= 256
    assert mixed
