"""Sharded checkpoints in canonical coordinates. Without experts, which the fsdp engine keeps stacked, they are the same
files, keys and shapes as its own.

A rank keeps a flat range of a local tensor's master weights and moments. Here that range becomes boxes of checkpoint
parameters, which torch.distributed.checkpoint writes and reads: a run resumes at other degrees of parallelism, and,
without experts, with the other engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hybridengine.sync.plan.boxes import Box, Ints, intersect
from hybridengine.sync.plan.spec import TensorSlice


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a checkpoint entry and the memory it is written from or read into.

    Attributes:
        key: entry of the checkpoint, such as "model.model.norm.weight".
        shape: the whole entry's.
        offsets: of the box.
        tensor: the box, a view.
    """

    key: str
    shape: Ints
    offsets: Ints
    tensor: Tensor


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Flat elements [start, stop) of a row-major tensor as boxes: the rest of a row, whole rows, part of a row.

    >>> list(flat_boxes(2, 9, (3, 4)))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    assert len(shape) == 2, shape
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            count = min(width - column, stop - start)
            yield (row, column), (1, count)
        else:
            rows = (stop - start) // width
            yield (row, 0), (rows, width)
            count = rows * width
        start += count


def blocks_of(
    slices: Iterable[TensorSlice], shape: Sequence[int], start: int, flat: Tensor, prefix: str, shapes: dict[str, Ints]
) -> Iterator[Block]:
    """What lies of ``slices`` of one local tensor of ``shape`` in its flat elements [start, start + len(flat)).

    Every slice spans whole rows of its local tensor, which is what megatron's layouts do.
    """
    width = shape[1] if len(shape) == 2 else 1
    for inside in flat_boxes(start, start + flat.numel(), shape):
        for item in slices:
            row = item.start // width
            assert row * width == item.start and item.sizes[1:] == tuple(shape[1:]), (item, shape)
            common = intersect(inside, ((row, *(0 for _ in shape[1:])), item.sizes))
            if common is None:
                continue
            offsets, sizes = common
            first = offsets[0] * width + (offsets[1] if len(shape) == 2 else 0) - start
            strides = (width, 1) if len(shape) == 2 else (1,)
            yield Block(
                f"{prefix}.{item.param}",
                shapes[item.param],
                tuple(o - base + at for o, base, at in zip(offsets, (row, 0), item.offsets, strict=False)),
                flat.as_strided(sizes, strides, flat.storage_offset() + first),
            )


class _Blocks:
    """Blocks by (entry, offsets)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.by_index = {(block.key, block.offsets): block for block in blocks}

    def __getitem__(self, index: MetadataIndex) -> Block:
        return self.by_index[index.fqn, tuple(index.offset or ())]


class BlockSavePlanner(DefaultSavePlanner):
    """Writes blocks beside what else is in the state dictionary. Blocks that several ranks hold are written once."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self._blocks = _Blocks(blocks)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            WriteItem(
                index=MetadataIndex(block.key, torch.Size(block.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(block),
                    properties=TensorProperties.create_from_tensor(block.tensor),
                    size=torch.Size(block.shape),
                ),
            )
            for block in self._blocks.by_index.values()
        ]
        self.plan = SavePlan([*plan.items, *items], plan.storage_data, plan.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._blocks[index].tensor if index.offset is not None else super().lookup_object(index)


class BlockLoadPlanner(DefaultLoadPlanner):
    """Reads blocks beside what else is in the state dictionary.

    Raises (on planning):
        ValueError: an entry that the checkpoint does not have, or has in another shape.
    """

    metadata: Metadata

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self._blocks = _Blocks(blocks)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items: list[ReadItem] = [*plan.items]
        for block in self._blocks.by_index.values():
            stored = self.metadata.state_dict_metadata.get(block.key)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"the checkpoint has no {block.key}")
            if tuple(stored.size) != block.shape:
                raise ValueError(f"{block.key} has shape {tuple(stored.size)} in the checkpoint, {block.shape} here")
            found = create_read_items_for_chunk_list(block.key, stored, [_chunk(block)])
            items += [_aimed(item, block) for item in found]
        return LoadPlan(items, plan.storage_data, plan.planner_data)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._blocks[index].tensor


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.size())


def _aimed(item: ReadItem, block: Block) -> ReadItem:
    index = MetadataIndex(block.key, torch.Size(block.offsets))
    return ReadItem(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)
