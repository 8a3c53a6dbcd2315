"""Who holds what, in canonical coordinates: ParamSpec, TensorSlice, ShardMap. Pure integers, no torch.

A model repeats itself: 28 layers of Qwen2.5-7B are cut in the same 12 ways. A ShardMap therefore stores
one *Pattern* per way of cutting (the boxes of every rank, without names) and, per parameter, which
pattern it follows and the names of the tensors it lives in. ``ranks`` shows the same thing written out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from hybridengine.sync.plan.boxes import Box, Ints, counts

#: Bytes per element, by torch's dtype name.
ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the Hugging Face checkpoint has it.

    ``dtype`` is torch's name without the prefix ("float32", "bfloat16").
    """

    name: str
    shape: Ints
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A box of a canonical parameter, and where it lives in one local tensor.

    Attributes:
        param: canonical parameter name.
        offsets, sizes: the box in canonical coordinates, one entry per dimension.
        tensor: key of the local tensor (in the engine's ``local_tensors()``) that holds the box.
        start: element offset of the box's first element from the local tensor's first element.
        strides: element strides of the box inside the local tensor's memory.

    Example: rows 4..7 of a [8, 3] weight held contiguously as a local [4, 3] tensor:
    ``TensorSlice("w", (4, 0), (4, 3), "w", 0, (3, 1))``.
    """

    param: str
    offsets: Ints
    sizes: Ints
    tensor: str
    start: int
    strides: Ints

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class Piece(NamedTuple):
    """A TensorSlice without names: ``slot`` indexes the tensor names of the Holding it is used by."""

    offsets: Ints
    sizes: Ints
    slot: int
    start: int
    strides: Ints

    @property
    def box(self) -> Box:
        return self.offsets, self.sizes


class Pattern:
    """One way to lay a parameter of ``shape`` over the ranks; shared by all parameters cut alike.

    Attributes:
        shape: canonical shape.
        ranks: ``ranks[r]`` are the pieces rank r holds, sorted; empty for a rank that holds nothing.
    """

    def __init__(self, shape: Sequence[int], ranks: Sequence[Sequence[Piece]]) -> None:
        self.shape: Ints = tuple(shape)
        self.ranks: tuple[tuple[Piece, ...], ...] = tuple(
            pieces if len(pieces) < 2 and isinstance(pieces, tuple) else tuple(sorted(pieces)) for pieces in ranks
        )

    @cached_property
    def digest(self) -> tuple[bytes, Ints]:
        """Hash with slots renumbered in order of first use, and that order."""
        order: dict[int, int] = {}
        plain = [
            [(p.offsets, p.sizes, order.setdefault(p.slot, len(order)), p.start, p.strides) for p in pieces]
            for pieces in self.ranks
        ]
        return hashlib.blake2b(repr((self.shape, plain)).encode(), digest_size=16).digest(), tuple(order)

    @cached_property
    def holders(self) -> tuple[int, int]:
        """Fewest and most holders over all elements (several pieces of one rank count separately)."""
        if 0 in self.shape:
            return 1, 1
        grid = counts(self.shape, [piece.box for pieces in self.ranks for piece in pieces])
        return int(grid.min()), int(grid.max())

    def fault(self) -> str | None:
        """What is wrong with the pieces themselves, or None."""
        for rank, pieces in enumerate(self.ranks):
            for piece in pieces:
                if not len(piece.offsets) == len(piece.sizes) == len(piece.strides) == len(self.shape):
                    return f"rank {rank}: {piece} has not {len(self.shape)} dimensions"
                for offset, size, extent in zip(piece.offsets, piece.sizes, self.shape, strict=True):
                    if offset < 0 or size < 1 or offset + size > extent:
                        return f"rank {rank}: box {piece.offsets} + {piece.sizes} is not inside {self.shape}"
                if piece.start < 0 or any(stride < 0 for stride in piece.strides):
                    return f"rank {rank}: {piece} has a negative start or stride"
        return None


class Holding(NamedTuple):
    """How one parameter is held: a pattern, and the local tensor names its slots stand for."""

    pattern: Pattern
    tensors: tuple[str, ...]


class ShardMap:
    """For every rank of the job, the slices it holds.

    Attributes:
        params: canonical parameters by name.
        ranks: ``ranks[r]`` are the slices of rank r; one canonical element may be held by several ranks.
        dtype: dtype name that the layout stores each parameter in (may differ from the checkpoint's), by name.
        holdings: the compact form, by canonical name.

    Layouts of many parameters are best made with :meth:`from_holdings`, sharing Pattern objects.
    """

    def __init__(
        self, params: Mapping[str, ParamSpec], ranks: Sequence[Sequence[TensorSlice]], dtype: Mapping[str, str]
    ) -> None:
        self.params = dict(params)
        self.dtype = dict(dtype)
        self.world_size = len(ranks)
        self.holdings = _holdings(self.params, ranks)
        _check_names("dtype", self.params, self.dtype)

    @classmethod
    def from_holdings(
        cls, params: Mapping[str, ParamSpec], holdings: Mapping[str, Holding], dtype: Mapping[str, str], world_size: int
    ) -> ShardMap:
        self = cls.__new__(cls)
        self.params, self.dtype = dict(params), dict(dtype)
        self.world_size = world_size
        _check_names("dtype", self.params, self.dtype)
        _check_names("holdings", self.params, holdings)
        self.holdings = {name: holdings[name] for name in self.params}
        return self

    @cached_property
    def ranks(self) -> RankSlices:
        return RankSlices(self)

    @cached_property
    def digest(self) -> str:
        """Equal for equal layouts, however they were built; different otherwise. Stable across processes."""
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self.params):
            spec, holding = self.params[name], self.holdings[name]
            digest, slots = holding.pattern.digest
            head = (name, spec.shape, spec.dtype, self.dtype[name], [holding.tensors[slot] for slot in slots])
            total.update(repr(head).encode())
            total.update(digest)
        return total.hexdigest()

    def multiplicity(self, param: str) -> int | None:
        """How many holders every element of ``param`` has, or None when elements differ in that."""
        fewest, most = self.holdings[param].pattern.holders
        return fewest if fewest == most else None

    def validate(self) -> ShardMap:
        """Every box in range, every element of every parameter held by someone.

        Raises:
            ValueError: naming the first parameter that breaks this.
        """
        checked: dict[int, tuple[str | None, int]] = {}
        for name, (pattern, _) in self.holdings.items():
            if pattern.shape != self.params[name].shape:
                raise ValueError(f"{name}: laid out as {pattern.shape}, but its shape is {self.params[name].shape}")
            if len(pattern.ranks) != self.world_size:
                raise ValueError(f"{name}: laid out over {len(pattern.ranks)} ranks, the map has {self.world_size}")
            if id(pattern) not in checked:
                fault = pattern.fault()
                checked[id(pattern)] = (fault, 0 if fault else pattern.holders[0])
            fault, fewest = checked[id(pattern)]
            if fault:
                raise ValueError(f"{name}: {fault}")
            if fewest == 0:
                raise ValueError(f"{name}: part of the {pattern.shape} parameter is held by no rank")
            if self.dtype[name] not in ITEMSIZE:
                raise ValueError(f"{name}: unknown dtype {self.dtype[name]!r}; known are {', '.join(ITEMSIZE)}")
        return self

    def held_bytes(self, rank: int) -> int:
        """Bytes of all slices of ``rank`` in the layout's dtypes."""
        return sum(
            prod(piece.sizes) * ITEMSIZE[self.dtype[name]]
            for name, holding in self.holdings.items()
            for piece in holding.pattern.ranks[rank]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardMap) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        patterns = len({id(holding.pattern) for holding in self.holdings.values()})
        return f"ShardMap({len(self.params)} parameters, {self.world_size} ranks, {patterns} patterns)"


class RankSlices(Sequence[tuple[TensorSlice, ...]]):
    """``ShardMap.ranks``: the written-out slices, made when a rank is first asked for."""

    def __init__(self, shard_map: ShardMap) -> None:
        self._holdings = shard_map.holdings
        self._made: list[tuple[TensorSlice, ...] | None] = [None] * shard_map.world_size

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, rank):  # type: ignore[no-untyped-def]
        if isinstance(rank, slice):
            return tuple(self[i] for i in range(*rank.indices(len(self))))
        made = self._made[rank]
        if made is None:
            made = self._made[rank] = tuple(
                TensorSlice(name, piece.offsets, piece.sizes, tensors[piece.slot], piece.start, piece.strides)
                for name, (pattern, tensors) in self._holdings.items()
                for piece in pattern.ranks[rank]
            )
        return made

    def __iter__(self) -> Iterator[tuple[TensorSlice, ...]]:
        return (self[rank] for rank in range(len(self)))


class PatternTable:
    """Hands out one Pattern object per distinct layout, so that equal layouts are planned once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Ints, tuple[tuple[Piece, ...], ...]], Pattern] = {}

    def intern(self, shape: Sequence[int], ranks: Sequence[Sequence[Piece]]) -> Pattern:
        pattern = Pattern(shape, ranks)
        return self._known.setdefault((pattern.shape, pattern.ranks), pattern)


def _holdings(params: Mapping[str, ParamSpec], ranks: Sequence[Sequence[TensorSlice]]) -> dict[str, Holding]:
    """Written-out slices to the compact form. Slots are numbered in order of first use over the ranks."""
    slots: dict[str, dict[str, int]] = {name: {} for name in params}
    pieces: dict[str, list[list[Piece]]] = {name: [[] for _ in ranks] for name in params}
    for rank, slices in enumerate(ranks):
        for item in sorted(slices, key=lambda s: (s.param, s.offsets, s.sizes, s.tensor, s.start)):
            if item.param not in params:
                raise ValueError(f"rank {rank} holds a slice of {item.param!r}, which is not a parameter of the map")
            names = slots[item.param]
            slot = names.setdefault(item.tensor, len(names))
            pieces[item.param][rank].append(Piece(item.offsets, item.sizes, slot, item.start, item.strides))
    table = PatternTable()
    return {name: Holding(table.intern(spec.shape, pieces[name]), tuple(slots[name])) for name, spec in params.items()}


def _check_names(what: str, params: Mapping[str, ParamSpec], given: Mapping[str, object]) -> None:
    missing, extra = [n for n in params if n not in given], [n for n in given if n not in params]
    if missing or extra:
        raise ValueError(f"{what}: missing {missing[:5]} ({len(missing)}), unknown {extra[:5]} ({len(extra)})")
