"""Arithmetic on N-dimensional integer boxes, each an (offsets, sizes) pair. Pure integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

Ints = tuple[int, ...]
#: (offsets, sizes): the elements offsets[d] <= i[d] < offsets[d] + sizes[d]. A zero-dimensional box is one element.
Box = tuple[Ints, Ints]


def whole(shape: Sequence[int]) -> Box:
    """The box that covers all of a tensor of this shape."""
    return (0,) * len(shape), tuple(shape)


def volume(box: Box) -> int:
    return prod(box[1])


def intersect(a: Box, b: Box) -> Box | None:
    """The common elements, or None when there are none.

    Example: rows 0..5 and rows 4..7 of two columns have rows 4..5 in common.

    >>> intersect(((0, 0), (6, 2)), ((4, 0), (4, 2)))
    ((4, 0), (2, 2))
    """
    offsets, sizes = [], []
    for start_a, size_a, start_b, size_b in zip(a[0], a[1], b[0], b[1], strict=True):
        start = max(start_a, start_b)
        size = min(start_a + size_a, start_b + size_b) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return tuple(offsets), tuple(sizes)


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of ``a`` that are not in ``b``, as disjoint boxes (at most two per dimension)."""
    common = intersect(a, b)
    if common is None:
        return [a]
    rest: list[Box] = []
    offsets, sizes = list(a[0]), list(a[1])
    for dim in range(len(offsets)):
        end, cut, cut_end = offsets[dim] + sizes[dim], common[0][dim], common[0][dim] + common[1][dim]
        for low, high in ((offsets[dim], cut), (cut_end, end)):
            if low < high:
                piece_offsets, piece_sizes = list(offsets), list(sizes)
                piece_offsets[dim], piece_sizes[dim] = low, high - low
                rest.append((tuple(piece_offsets), tuple(piece_sizes)))
        offsets[dim], sizes[dim] = cut, cut_end - cut
    return rest


def subtract_all(box: Box, cuts: Iterable[Box]) -> list[Box]:
    """The elements of ``box`` that are in none of ``cuts``."""
    rest = [box]
    for cut in cuts:
        rest = list(itertools.chain.from_iterable(subtract(piece, cut) for piece in rest))
    return rest


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Row-major element strides.

    >>> contiguous_strides((4, 2, 3))
    (6, 3, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def counts(shape: Sequence[int], boxes: Sequence[Box]) -> np.ndarray:
    """How many boxes hold each cell of the grid that the boxes' own edges cut ``shape`` into."""
    edges = [
        np.unique([0, size, *(e for o, s in boxes for e in (o[dim], o[dim] + s[dim]))])
        for dim, size in enumerate(shape)
    ]
    grid = np.zeros([len(e) - 1 for e in edges], dtype=np.int64)
    for offsets, sizes in boxes:
        low = [np.searchsorted(e, o) for e, o in zip(edges, offsets, strict=True)]
        high = [np.searchsorted(e, o + s) for e, o, s in zip(edges, offsets, sizes, strict=True)]
        grid[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return grid
