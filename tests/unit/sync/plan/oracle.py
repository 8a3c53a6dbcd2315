"""An independent check of plans: fill memory element by element, run the copies, compare element by element."""

from __future__ import annotations

from math import prod

import numpy as np

from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.plan.spec import ITEMSIZE, ShardMap, TensorSlice

Memory = dict[str, np.ndarray]


def addresses(item: TensorSlice) -> tuple[np.ndarray, np.ndarray]:
    """(canonical coordinates [n, d], element addresses in the local tensor [n]) of a slice, by enumeration."""
    inside = np.stack(np.unravel_index(np.arange(prod(item.sizes)), item.sizes), axis=1) if item.sizes else np.zeros(
        (1, 0), dtype=np.int64
    )  # fmt: skip
    return inside + np.array(item.offsets, dtype=np.int64), item.start + inside @ np.array(item.strides, dtype=np.int64)


def values_of(layout: ShardMap, name: str) -> np.ndarray:
    """arange over the parameter, offset so that no two parameters share a value."""
    before = sum(spec.numel for other, spec in layout.params.items() if other < name)
    return np.arange(layout.params[name].numel, dtype=np.int64).reshape(layout.params[name].shape) + 1 + before


def filled(layout: ShardMap, rank: int) -> Memory:
    """The local tensors of a rank, holding the canonical values where the layout says, -1 elsewhere."""
    written: dict[str, dict[int, int]] = {}
    for item in layout.ranks[rank]:
        coordinates, places = addresses(item)
        values = values_of(layout, item.param)[tuple(coordinates.T)]
        tensor = written.setdefault(item.tensor, {})
        for place, value in zip(places.tolist(), np.atleast_1d(values).tolist(), strict=True):
            assert tensor.setdefault(place, value) == value, f"{item} overlaps another slice in {item.tensor}"
    memory = {}
    for name, tensor in written.items():
        memory[name] = np.full(max(tensor) + 1, -1, dtype=np.int64)
        memory[name][list(tensor)] = list(tensor.values())
    return memory


def walk(start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Addresses of a strided box in row-major order of its index."""
    where = np.array([start], dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        where = (where[:, None] + stride * np.arange(size)).reshape(-1)
    return where


def execute(plan: ReshardPlan) -> list[Memory]:
    """Run the plan on filled source memories; also checks that each copy's index walk names its elements."""
    sources = [filled(plan.source, rank) for rank in range(plan.world_size)]
    targets = [{k: np.full_like(v, -1) for k, v in filled(plan.target, r).items()} for r in range(plan.world_size)]
    for rank in range(plan.world_size):
        for copy in plan.copies(rank):
            assert copy.target_rank == rank
            box = copy.box
            assert min((*box.source_strides, *box.target_strides, *box.index_strides), default=0) >= 0
            values = sources[copy.source_rank][copy.source][walk(box.source_start, box.sizes, box.source_strides)]
            index = walk(box.index_start, box.sizes, box.index_strides)
            assert np.array_equal(values, values_of(plan.source, copy.param).reshape(-1)[index])
            places = walk(box.target_start, box.sizes, box.target_strides)
            assert (targets[rank][copy.target][places] == -1).all(), f"{copy} writes what is written already"
            targets[rank][copy.target][places] = values
    return targets


def lacking_bytes(source: ShardMap, target: ShardMap, rank: int) -> int:
    """``|B_r \\ A_r|`` in target bytes, by marking elements."""
    total = 0
    for name, spec in target.params.items():
        marks = []
        for layout in (source, target):
            mark = np.zeros(spec.shape, dtype=bool)
            for item in layout.ranks[rank]:
                if item.param == name:
                    mark[tuple(addresses(item)[0].T)] = True
            marks.append(mark)
        total += int((marks[1] & ~marks[0]).sum()) * ITEMSIZE[target.dtype[name]]
    return total


def verify(plan: ReshardPlan) -> None:
    """The executed plan is the target layout, at the minimum of bytes, and both ends list the same copies."""
    for rank, memory in enumerate(execute(plan)):
        wanted = filled(plan.target, rank)
        assert memory.keys() == wanted.keys()
        for name in wanted:
            assert np.array_equal(memory[name], wanted[name]), f"rank {rank}: {name}"
        minimum = lacking_bytes(plan.source, plan.target, rank)
        assert plan.received_bytes(rank) == minimum == plan.minimum_bytes(rank)
        assert minimum == sum(copy.nbytes for copy in plan.copies(rank) if not copy.is_local)
    for reader in range(plan.world_size):
        for sender in range(plan.world_size):
            if reader != sender:
                sent = [copy for copy in plan.sends(sender) if copy.target_rank == reader]
                assert sent == [copy for copy in plan.copies(reader) if copy.source_rank == sender]
