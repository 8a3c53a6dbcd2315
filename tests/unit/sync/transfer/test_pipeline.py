"""Lanes: steps of several ranks that wait for each other, by the library and in Python alike."""

from __future__ import annotations

import mmap
import threading
from functools import partial

import numpy as np
import pytest
import torch

from hybridengine import native
from hybridengine.distributed.errors import PeerLostError
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.control import PAGE_BYTES, ControlPage, Waiter
from hybridengine.sync.transfer.fingerprint import Ledger
from hybridengine.sync.transfer.host_pipeline import Lanes
from hybridengine.sync.transfer.lanes import Gate, Lane
from hybridengine.sync.transfer.tables import BoxTable, TableBuilder
from tests.distributed.layouts import Holder, layout, only

CPU = torch.device("cpu")
BY_LIBRARY = pytest.mark.parametrize(
    "by_library",
    [pytest.param(True, marks=pytest.mark.skipif(native.load() is None, reason="no compiler")), False],
    ids=["library", "python"],
)


@pytest.fixture
def pages() -> dict[int, ControlPage]:
    return {rank: ControlPage(mmap.mmap(-1, PAGE_BYTES), readers=2, create=True) for rank in range(2)}


def table_of(src: torch.Tensor, dst: torch.Tensor, cuts: list[int]) -> BoxTable:
    """``src`` to ``dst``, a box between any two cuts, all counted in sum 0."""
    boxes = native.new_boxes(len(cuts) - 1)
    for row, begin, end in zip(boxes, cuts[:-1], cuts[1:], strict=True):
        row["src"], row["dst"] = src[begin:].data_ptr(), dst[begin:].data_ptr()
        row["op"], row["slot"][0], row["index"] = native.copy_op(src.dtype, dst.dtype), 0, begin
        native.set_dims(row, (end - begin,), (1,), (1,), (1,))
    table = TableBuilder(None, CPU).build()
    table.boxes = boxes
    return table


class Relay:
    """Rank 0 copies a to b in five steps, rank 1 b to c; b has room for two steps only, so both wait for each other."""

    CUTS = (0, 3, 4, 100, 70_000, 70_003)

    def __init__(self, pages: dict[int, ControlPage], by_library: bool, alive=lambda rank: True) -> None:
        self.a, self.c = torch.randn(self.CUTS[-1]), torch.zeros(self.CUTS[-1])
        self.b = b = torch.full_like(self.a, float("nan"))
        cuts, steps = list(self.CUTS), range(len(self.CUTS) - 1)
        filled, drained = pages[0].word("filled"), pages[0].word("drained", 1)
        fill = Lane(
            table_of(self.a, b, cuts),
            steps_of(cuts),
            [Gate({1: drained} if k > 1 else {}, k - 1) for k in steps],
            filled,
        )
        drain = Lane(table_of(b, self.c, cuts), steps_of(cuts), [Gate({0: filled}, k + 1) for k in steps], drained)
        self.sums = [np.zeros(1, np.uint64) for _ in range(2)]
        self.lanes = [Lanes([lane]) for lane in (fill, drain)]
        self.waiters = [Waiter({1 - rank: pages[1 - rank]}, alive, 5) for rank in range(2)]
        for lanes in self.lanes:
            lanes._advance = partial(lanes._advance, by_library=by_library)  # type: ignore[method-assign]

    def run(self, rank: int, generation: int) -> None:
        self.lanes[rank].run(generation, self.sums[rank], self.waiters[rank], "pass it on")


def steps_of(cuts: list[int]) -> list[int]:
    return list(range(len(cuts)))


@BY_LIBRARY
def test_ranks_take_turns_through_a_short_ring(pages: dict[int, ControlPage], by_library: bool) -> None:
    relay = Relay(pages, by_library)
    for generation in (1, 2, 7):
        relay.c.zero_()
        relay.a.add_(1.0)
        for sums in relay.sums:
            sums[:] = 0
        other = threading.Thread(target=relay.run, args=(1, generation))
        other.start()
        relay.run(0, generation)
        other.join()
        assert torch.equal(relay.c, relay.a)
        assert relay.sums[0] == relay.sums[1] != 0


@BY_LIBRARY
def test_nobody_runs_ahead_of_a_closed_gate(pages: dict[int, ControlPage], by_library: bool) -> None:
    """The reader has not begun: two steps fit, the third waits, and the loss of the reader is told by its name."""
    relay = Relay(pages, by_library, alive=lambda rank: False)
    with pytest.raises(PeerLostError, match="rank 1 died before it could pass it on"):
        relay.run(0, 1)
    assert pages[0].get("filled") == (1 << 24) + 2
    assert relay.c.count_nonzero() == 0


@BY_LIBRARY
def test_several_lanes_of_one_rank_feed_each_other(pages: dict[int, ControlPage], by_library: bool) -> None:
    """A rank that fills and drains alone never waits; sums of all lanes go into the same accumulators."""
    relay = Relay(pages, by_library)
    both = Lanes([lane for lanes in relay.lanes for lane in lanes.lanes])
    sums = np.zeros(1, np.uint64)
    assert both._advance(3 << 24, sums, by_library=by_library)
    assert torch.equal(relay.c, relay.a)
    once = np.zeros(1, np.uint64)
    native.run_boxes(relay.lanes[0].lanes[0].table.boxes, once)
    assert sums == once + once


def test_no_lanes_are_at_their_end() -> None:
    Lanes([]).run(1, None, Waiter({}, lambda rank: True, 1), "do nothing")


@pytest.mark.skipif(native.load() is None, reason="no compiler")
def test_a_row_is_the_c_struct_and_an_unknown_op_is_refused(pages: dict[int, ControlPage]) -> None:
    relay = Relay(pages, True)
    relay.lanes[0].lanes[0].table.boxes["op"] = 9
    with pytest.raises(ValueError, match="unknown op"):
        relay.run(0, 1)


def test_a_table_runs_in_parts() -> None:
    plan = build_plan(layout(only({0}), 1, "float32"), layout(only({0}), 1, "float32"))
    train, rollout = Holder(plan.source, 0, fill=1), Holder(plan.target, 0)
    ledger = Ledger(plan.source, plan.target, 0)
    builder = TableBuilder(ledger, CPU)
    for copy in plan.copies(0):
        builder.copy(copy, train.tensors)
    table, sums = builder.build(), np.zeros(ledger.size, np.uint64)
    table.aim(rollout.tensors, train.tensors)
    table.run(sums, 0, len(builder) - 1)
    assert not rollout.holds(1)
    table.run(sums, len(builder) - 1, len(builder))
    assert rollout.holds(1)
