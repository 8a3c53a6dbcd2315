"""Weights that an engine stores in another order than its loader wrote them: from one arrangement to the other.

An engine's kernels may want a tensor's halves exchanged, its rows shuffled, its blocks laid out one behind the other.
Such a rearrangement is a set of boxes from the *loaded* to the *stored* tensor, each a TensorSlice whose ``param`` is
the loaded tensor. Composed with the slices of a loader's layout, it gives the place in the stored tensor of every
element of the checkpoint is, and a transfer writes there directly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hybridengine.sync.plan.boxes import Box, Ints, contiguous_strides, intersect
from hybridengine.sync.plan.spec import TensorSlice

#: A rearrangement into more boxes than this is no use as a plan.
MAX_BOXES = 1_000_000


def rearrangement(name: str, coordinates: Sequence[np.ndarray], strides: Sequence[int]) -> tuple[TensorSlice, ...]:
    """The boxes of one tensor.

    Args:
        name: of the loaded and the stored tensor.
        coordinates: per dimension of the loaded tensor, in the stored tensor's shape: 1 + the index of the loaded
            element that is stored there; 0 for padding.
        strides: of the stored tensor, elements.

    Example: [a b c d] stored as [c d a b] has coordinates [3 4 1 2] and is two boxes:

    >>> [(s.offsets, s.sizes, s.start) for s in rearrangement("w", [np.array([3, 4, 1, 2])], (1,))]
    [((2,), (2,), 0), ((0,), (2,), 2)]

    Raises:
        ValueError: elements are stored several times, or it takes more than MAX_BOXES boxes.
    """
    found = []
    for piece in _cut(name, [np.asarray(a) for a in coordinates], tuple(strides), 0):
        found.append(piece)
        if len(found) > MAX_BOXES:
            raise ValueError(f"{name} is stored in an order that takes more than {MAX_BOXES} boxes to describe")
    return tuple(found)


def _cut(name: str, coordinates: list[np.ndarray], strides: Ints, start: int) -> Iterator[TensorSlice]:
    """A stored axis must carry one loaded dimension, and a loaded dimension one stored axis; else it is split."""
    shape = coordinates[0].shape
    axes = [[axis for axis in range(len(shape)) if _varies(a, axis)] for a in coordinates]
    users = [sum(axis in used for used in axes) for axis in range(len(shape))]
    torn = {axis for used in axes if len(used) > 1 for axis in used} | {a for a, count in enumerate(users) if count > 1}
    if torn:
        axis = min(torn, key=lambda axis: shape[axis])
        for i in range(shape[axis]):
            narrowed = [a.take([i], axis=axis) for a in coordinates]
            yield from _cut(name, narrowed, strides, start + i * strides[axis])
        return
    if any(shape[axis] > 1 and not users[axis] for axis in range(len(shape))):
        if not any(a.any() for a in coordinates):
            return  # all of it is padding
        raise ValueError(f"{name}: elements of it are stored several times")
    runs, steps = [], []
    for used, a in zip(axes, coordinates, strict=True):
        axis = used[0] if used else 0
        values = _along(a, axis)
        runs.append(_runs(values if used else values[:1]))
        steps.append(strides[axis] if used else 0)
    for combination in itertools.product(*runs):
        yield TensorSlice(
            name,
            tuple(first for first, _, _ in combination),
            tuple(length for _, length, _ in combination),
            name,
            start + sum(at * step for (_, _, at), step in zip(combination, steps, strict=True)),
            tuple(steps),
        )


def _varies(array: np.ndarray, axis: int) -> bool:
    return array.shape[axis] > 1 and bool((array != array.take([0], axis=axis)).any())


def _along(array: np.ndarray, axis: int) -> np.ndarray:
    """The values along one axis, at the first index of all others."""
    return array[tuple(slice(None) if d == axis else 0 for d in range(array.ndim))]


def _runs(values: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of consecutive indices, padding left out, as (first index, length, position)."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    edges = [0, *breaks.tolist(), len(values)]
    runs = []
    for low, high in zip(edges, edges[1:], strict=False):
        low += int(values[low] == 0)  # 0, 1, 2 is one run of numbers that begins with padding
        if low < high:
            runs.append((int(values[low]) - 1, high - low, low))
    return runs


def compose(
    slices: Sequence[TensorSlice],
    stored: Mapping[str, Sequence[TensorSlice]],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[TensorSlice, ...]:
    """Slices of loaded tensors as slices of the stored ones.

    Args:
        slices: canonical parameters in loaded tensors.
        stored: loaded tensor -> its boxes (see :func:`rearrangement`); tensors that are stored as loaded are absent.
        shapes: of the loaded tensors in ``stored``, which are contiguous.
    """
    found: list[TensorSlice] = []
    for piece in slices:
        if piece.tensor not in stored:
            found.append(piece)
            continue
        box, dims = _loaded_box(piece, shapes[piece.tensor])
        for part in stored[piece.tensor]:
            common = intersect(box, (part.offsets, part.sizes))
            if common is not None:
                found.append(_composed(piece, part, box, common, dims))
    return tuple(found)


def _loaded_box(piece: TensorSlice, shape: Sequence[int]) -> tuple[Box, list[int | None]]:
    """The box of the loaded tensor that a slice is, and which of its dimensions each canonical one lies along."""
    strides, rest = contiguous_strides(shape), piece.start
    offsets = []
    for stride in strides:
        at, rest = divmod(rest, stride)
        offsets.append(at)
    sizes, dims = [1] * len(shape), list[int | None]()
    for size, stride in zip(piece.sizes, piece.strides, strict=True):
        dim = next((d for d, s in enumerate(strides) if s == stride and shape[d] > 1), None) if size > 1 else None
        if size > 1:
            assert dim is not None, (piece, shape)
            sizes[dim] = size
        dims.append(dim)
    return (tuple(offsets), tuple(sizes)), dims


def _composed(piece: TensorSlice, part: TensorSlice, box: Box, common: Box, dims: list[int | None]) -> TensorSlice:
    start = part.start + sum(
        (at - origin) * stride for at, origin, stride in zip(common[0], part.offsets, part.strides, strict=True)
    )
    offsets, sizes, strides = [], [], []
    for offset, dim in zip(piece.offsets, dims, strict=True):
        if dim is None:
            offsets.append(offset)
            sizes.append(1)
            strides.append(0)
        else:
            offsets.append(offset + common[0][dim] - box[0][dim])
            sizes.append(common[1][dim])
            strides.append(part.strides[dim])
    return TensorSlice(piece.param, tuple(offsets), tuple(sizes), piece.tensor, start, tuple(strides))
