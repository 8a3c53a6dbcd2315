"""Who holds what, in canonical coordinates: ParamSpec, TensorSlice, ShardMap. Pure integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the Hugging Face checkpoint has it.

    ``dtype`` is torch's name without the prefix ("float32", "bfloat16").
    """

    name: str
    shape: Ints
    dtype: str


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


@dataclass(frozen=True, slots=True)
class ShardMap:
    """For every rank of the job, the slices it holds.

    Attributes:
        params: canonical parameters by name.
        ranks: ``ranks[r]`` are the slices of rank r; one canonical element may be held by several ranks.
        dtype: dtype name that the layout stores each parameter in (may differ from the checkpoint's), by name.
    """

    params: dict[str, ParamSpec]
    ranks: tuple[tuple[TensorSlice, ...], ...]
    dtype: dict[str, str]
