"""Training-side layouts without tensor parallelism: FSDP2 and full replicas. Pure integers.

A model may store its parameters otherwise than the checkpoint does (transformers keeps the experts of a
layer in one [E, 2f, h] tensor). A *StoredTensor* is a tensor as the model has it and the canonical
parameters inside it; sharding cuts the stored tensor, and the canonical boxes follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridengine.sync.plan.boxes import Box, Ints, contiguous_strides, intersect, whole
from hybridengine.sync.plan.spec import Holding, ParamSpec, PatternTable, Piece, ShardMap


class Part(NamedTuple):
    """A canonical parameter inside a stored tensor.

    Canonical element 0 is stored at ``origin``; canonical dimension i runs along stored axis ``axes[i]``.
    Example: the up projection of expert 3 in a [E, 2f, h] tensor is ``Part(name, (3, f, 0), (1, 2))``.
    """

    param: str
    origin: Ints
    axes: Ints


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the unsharded model: its name there, its shape, and what it holds.

    ``whole``: every rank holds all of it (a buffer, which is not trained).
    """

    name: str
    shape: Ints
    parts: tuple[Part, ...]
    whole: bool = False

    @classmethod
    def plain(cls, spec: ParamSpec, *, whole: bool = False) -> StoredTensor:
        """A parameter that the model stores as the checkpoint does, under the same name."""
        axes = tuple(range(len(spec.shape)))
        return cls(spec.name, spec.shape, (Part(spec.name, (0,) * len(spec.shape), axes),), whole)


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """(start, length) of chunk ``index`` as ``torch.chunk`` cuts, empty chunks at the end included.

    Example: 10 rows over 4 are 3, 3, 3, 1; 5 over 2 are 3, 2; 3 over 4 are 1, 1, 1, 0.

    >>> [chunk(10, 4, i) for i in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    step = -(-size // count)
    start = min(step * index, size)
    return start, min(start + step, size) - start


def fsdp_shard_map(
    params: Mapping[str, ParamSpec],
    world_size: int,
    *,
    dims: Mapping[str, int] | None = None,
    order: Sequence[int] | None = None,
    dtype: str | Mapping[str, str] = "float32",
    stored: Sequence[StoredTensor] | None = None,
) -> ShardMap:
    """The layout of FSDP2's ``fully_shard`` over one mesh axis.

    Args:
        params: canonical parameters.
        dims: sharded dimension per *stored tensor* name; 0 where not given. Shard(1) needs even chunks.
        order: ``order[s]`` is the rank that holds shard s (the ranks of the FSDP mesh, in mesh order).
        dtype: dtype name of the shards (FSDP's master weights), one for all or by canonical name.
        stored: the model's own tensors where they differ from ``params``; local tensors carry their names.

    Local shards are contiguous tensors: [rows_s, ...] for Shard(0), [rows, columns / N, ...] for Shard(1).

    Raises:
        ValueError: an order that is no permutation, an uneven Shard(1), a parameter stored nowhere or twice.
    """
    order = list(range(world_size)) if order is None else list(order)
    if sorted(order) != list(range(world_size)):
        raise ValueError(f"order {order} is not a permutation of the ranks 0..{world_size - 1}")
    dims = dims or {}

    def boxes(tensor: StoredTensor) -> list[Box | None]:
        if tensor.whole:
            return [whole(tensor.shape)] * world_size
        dim = dims.get(tensor.name, 0)
        if not 0 <= dim < max(1, len(tensor.shape)):
            raise ValueError(f"{tensor.name}: shard dimension {dim} of a tensor of shape {list(tensor.shape)}")
        if dim > 0 and tensor.shape[dim] % world_size:
            raise ValueError(
                f"{tensor.name}: FSDP shards dimension {dim} only evenly, and {tensor.shape[dim]} "
                f"is not divisible by {world_size} ranks; shard dimension 0"
            )
        found: list[Box | None] = [None] * world_size
        for shard, rank in enumerate(order):
            start, length = chunk(tensor.shape[dim], world_size, shard)
            if length:
                offsets, sizes = list((0,) * len(tensor.shape)), list(tensor.shape)
                offsets[dim], sizes[dim] = start, length
                found[rank] = tuple(offsets), tuple(sizes)
        return found

    return _cut(params, world_size, stored, dtype, boxes, lambda tensor: (dims.get(tensor.name, 0), tensor.whole))


def replicated_shard_map(
    params: Mapping[str, ParamSpec],
    world_size: int,
    *,
    dtype: str | Mapping[str, str] = "float32",
    stored: Sequence[StoredTensor] | None = None,
) -> ShardMap:
    """Every rank holds every parameter in full, as contiguous tensors (a Hugging Face model per rank)."""
    return _cut(
        params, world_size, stored, dtype, lambda tensor: [whole(tensor.shape)] * world_size, lambda tensor: None
    )


def dtype_by_name(params: Mapping[str, ParamSpec], dtype: str | Mapping[str, str]) -> dict[str, str]:
    return dict.fromkeys(params, dtype) if isinstance(dtype, str) else dict(dtype)


def place(part: Part, shape: Ints, cut: Box, slot: int) -> Piece | None:
    """The piece of a canonical parameter of ``shape`` that lies in the box ``cut`` of its stored tensor.

    The local tensor is exactly ``cut``, contiguous.
    """
    inside = list((1,) * len(cut[0]))
    for axis, size in zip(part.axes, shape, strict=True):
        inside[axis] = size
    common = intersect((part.origin, tuple(inside)), cut)
    if common is None:
        return None
    strides = contiguous_strides(cut[1])
    start = sum((o - c) * s for o, c, s in zip(common[0], cut[0], strides, strict=True))
    return Piece(
        tuple(common[0][axis] - part.origin[axis] for axis in part.axes),
        tuple(common[1][axis] for axis in part.axes),
        slot,
        start,
        tuple(strides[axis] for axis in part.axes),
    )


def _cut(params, world_size, stored, dtype, boxes, key) -> ShardMap:  # type: ignore[no-untyped-def]
    """Cut stored tensors into the per-rank ``boxes(tensor)``; tensors of equal shape and ``key`` are cut alike."""
    stored = [StoredTensor.plain(spec) for spec in params.values()] if stored is None else stored
    table = PatternTable()
    cuts: dict[object, list[Box | None]] = {}
    known: dict[object, object] = {}
    holdings: dict[str, Holding] = {}
    for tensor in stored:
        alike = (tensor.shape, key(tensor))
        if alike not in cuts:
            cuts[alike] = boxes(tensor)
        for part in tensor.parts:
            if part.param not in params:
                raise ValueError(f"{tensor.name} stores {part.param!r}, which is not a canonical parameter")
            if part.param in holdings:
                raise ValueError(f"{part.param} is stored twice: in {holdings[part.param].tensors[0]}, {tensor.name}")
            shape = params[part.param].shape
            same = (alike, part.origin, part.axes, shape)
            if same not in known:
                placed = [None if cut is None else place(part, shape, cut, 0) for cut in cuts[alike]]
                known[same] = table.intern(shape, [() if piece is None else (piece,) for piece in placed])
            holdings[part.param] = Holding(known[same], (tensor.name,))  # type: ignore[arg-type]
    if absent := [name for name in params if name not in holdings]:
        raise ValueError(f"stored in no tensor of the model: {absent[:10]} ({len(absent)})")
    return ShardMap.from_holdings(params, holdings, dtype_by_name(params, dtype), world_size)
