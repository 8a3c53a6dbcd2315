"""Small layouts and plain tensor holders for the transfer tests: every element's value is its canonical index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from hybridengine.sync.plan.boxes import Box, contiguous_strides
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice

#: Rows that do not divide by 2 or 4, one dimension, a matrix larger than the smallest bucket, three dimensions.
SHAPES = {"embed": (10, 6), "norm": (7,), "proj": (8, 12), "experts": (4, 6, 8), "tall": (33, 5), "one": (1,)}

#: Engines that keep some parameters in full precision: cast, float32 and bfloat16 as they are, side by side in chunks.
MIXED_SOURCE = dict.fromkeys(SHAPES, "float32") | {"embed": "bfloat16"}
MIXED_TARGET = dict.fromkeys(SHAPES, "bfloat16") | {"norm": "float32", "experts": "float32"}

#: (shape, rank, world size) -> the box the rank holds, or None.
Cut = Callable[[tuple[int, ...], int, int], "Box | None"]


def shard(dim: int) -> Cut:
    """FSDP's cut: ceil(rows / n) rows per rank, the last ranks fewer or none. Vectors always along dimension 0."""

    def cut(shape: tuple[int, ...], rank: int, size: int) -> Box | None:
        axis = dim if len(shape) > dim else 0
        step = -(-shape[axis] // size)
        start, stop = min(rank * step, shape[axis]), min((rank + 1) * step, shape[axis])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = start, stop - start
        return (tuple(offsets), tuple(sizes)) if stop > start else None

    return cut


def tensor_parallel(tp: int, dim: int) -> Cut:
    """Replicas of ``tp`` ranks that cut matrices along ``dim``; vectors are on every rank."""

    def cut(shape: tuple[int, ...], rank: int, size: int) -> Box | None:
        if len(shape) == 1:
            return ((0,), shape)
        return shard(dim)(shape, rank % tp, tp)

    return cut


def only(ranks: set[int]) -> Cut:
    """The whole parameter on some ranks, nothing on the others."""
    return lambda shape, rank, size: ((0,) * len(shape), shape) if rank in ranks else None


def layout(
    cut: Cut, size: int, dtype: str | Mapping[str, str], *, transposed: bool = False, shapes: Mapping = SHAPES
) -> ShardMap:
    """One local tensor per parameter, of one dtype or each of its own; ``transposed`` ones keep their last dimension
    outermost in memory."""
    dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dict(dtype)
    ranks = []
    for rank in range(size):
        slices = []
        for name, shape in shapes.items():
            box = cut(shape, rank, size)
            if box is not None:
                strides = contiguous_strides(box[1])
                if transposed:
                    strides = contiguous_strides(box[1][::-1])[::-1]
                slices.append(TensorSlice(name, *box, name, 0, strides))
        ranks.append(tuple(slices))
    params = {name: ParamSpec(name, tuple(shape), dtypes[name]) for name, shape in shapes.items()}
    return ShardMap(params, ranks, dtypes).validate()


def full_value(name: str, version: int, dtype: str, *, shapes: Mapping = SHAPES) -> torch.Tensor:
    """``arange`` shifted by parameter and version: no two elements of a parameter alike, exact in float32."""
    shape = tuple(shapes[name])
    count = int(torch.tensor(shape).prod())
    start = 1000 * list(shapes).index(name) + 17 * version
    return (torch.arange(count, dtype=torch.float32) + start).view(shape).to(getattr(torch, dtype))


class Holder:
    """A dict of tensors laid out by a ShardMap: plays either engine."""

    def __init__(
        self,
        shard_map: ShardMap,
        rank: int,
        *,
        fill: int | None = None,
        shapes: Mapping = SHAPES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.map, self.rank, self.shapes = shard_map, rank, shapes
        self.tensors: dict[str, torch.Tensor] = {}
        for piece in shard_map.ranks[rank]:
            dtype = getattr(torch, shard_map.dtype[piece.param])
            memory = torch.full((torch.tensor(piece.sizes).prod(),), -1.0, dtype=dtype, device=device)
            self.tensors[piece.tensor] = memory.as_strided(piece.sizes, piece.strides)
        if fill is not None:
            self.write(fill)

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        found = {}
        for piece in self.map.ranks[self.rank]:
            value = full_value(piece.param, version, "float32", shapes=self.shapes)
            for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                value = value.narrow(dim, start, size)
            found[piece.tensor] = value.to(self.tensors[piece.tensor])
        return found

    def write(self, version: int) -> None:
        """In place, as an optimizer does."""
        for name, value in self.expected(version).items():
            self.tensors[name].copy_(value)

    def holds(self, version: int) -> bool:
        return all(torch.equal(self.tensors[name], value) for name, value in self.expected(version).items())

    # the engines' interfaces
    def shard_map(self) -> ShardMap:
        return self.map

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def memory_holders(self) -> list[torch.Tensor]:
        return []

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def alias_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        return False

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.shapes:
            yield name, full_value(name, self.version, "float32", shapes=self.shapes)

    version = 0

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        for piece in self.map.ranks[self.rank]:
            if piece.param == name:
                part = full
                for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                self.tensors[piece.tensor].copy_(part)
