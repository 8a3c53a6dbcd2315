"""Strided copies, and merging many small ones into few large ones. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from hybridengine.sync.plan.boxes import Ints


class Strided(NamedTuple):
    """One copy as three affine walks over the same N-d index: where it is read, written, and what it means.

    Element ``i`` (one entry per dimension) is read at ``source_start + i . source_strides`` of the source
    tensor, written at ``target_start + i . target_strides`` of the target tensor, and is the canonical
    element with flat row-major index ``index_start + i . index_strides``. All in elements.
    Dimensions are ordered so that target strides decrease; sizes of one are dropped.
    """

    sizes: Ints
    source_start: int
    source_strides: Ints
    target_start: int
    target_strides: Ints
    index_start: int
    index_strides: Ints

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def narrow(self, dim: int, start: int, size: int) -> Strided:
        """The part with ``start <= i[dim] < start + size``."""
        return Strided(
            (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
            self.source_start + start * self.source_strides[dim],
            self.source_strides,
            self.target_start + start * self.target_strides[dim],
            self.target_strides,
            self.index_start + start * self.index_strides[dim],
            self.index_strides,
        )


def simplify(box: Strided) -> Strided:
    """Same elements in the fewest dimensions.

    Example: a [2, 3] block that is contiguous everywhere is a run of 6.

    >>> simplify(Strided((2, 3), 6, (3, 1), 0, (3, 1), 6, (3, 1))).sizes
    (6,)
    """
    dims = sorted(
        (
            (size, source, target, index)
            for size, source, target, index in zip(
                box.sizes, box.source_strides, box.target_strides, box.index_strides, strict=True
            )
            if size != 1
        ),
        key=lambda dim: (-dim[2], -dim[1]),
    )
    merged: list[tuple[int, int, int, int]] = []
    for size, source, target, index in reversed(dims):
        if merged:
            n, s, t, i = merged[-1]
            if (source, target, index) == (n * s, n * t, n * i):
                merged[-1] = (n * size, s, t, i)
                continue
        merged.append((size, source, target, index))
    merged.reverse()
    if not merged:
        return Strided((), box.source_start, (), box.target_start, (), box.index_start, ())
    sizes, sources, targets, indices = zip(*merged, strict=True)
    return Strided(sizes, box.source_start, sources, box.target_start, targets, box.index_start, indices)


def coalesce(boxes: Iterable[Strided]) -> list[Strided]:
    """The same copies with neighbours joined and regular series folded into one more dimension."""
    found = sorted((simplify(box) for box in boxes), key=_order)
    while True:
        folded = sorted((simplify(box) for box in _fold(_join(found))), key=_order)
        if len(folded) == len(found):
            return folded
        found = folded


def _order(box: Strided) -> tuple[int, int]:
    return box.target_start, box.source_start


def _starts(box: Strided) -> Ints:
    return box.source_start, box.target_start, box.index_start


def _steps(box: Strided) -> tuple[Ints, Ints, Ints]:
    return box.source_strides, box.target_strides, box.index_strides


def _join(boxes: Sequence[Strided]) -> list[Strided]:
    """Join a box with the next one where the two lie end to end along one dimension."""
    joined: list[Strided] = []
    for box in boxes:
        if joined and (whole := _end_to_end(joined[-1], box)) is not None:
            joined[-1] = whole
        else:
            joined.append(box)
    return joined


def _end_to_end(first: Strided, second: Strided) -> Strided | None:
    if _steps(first) != _steps(second):
        return None
    delta = tuple(b - a for a, b in zip(_starts(first), _starts(second), strict=True))
    for dim, steps in enumerate(zip(*_steps(first), strict=True)):
        same = first.sizes[:dim] == second.sizes[:dim] and first.sizes[dim + 1 :] == second.sizes[dim + 1 :]
        if same and delta == tuple(step * first.sizes[dim] for step in steps):
            return first._replace(
                sizes=(*first.sizes[:dim], first.sizes[dim] + second.sizes[dim], *first.sizes[dim + 1 :])
            )
    return None


def _fold(boxes: Sequence[Strided]) -> list[Strided]:
    """Replace runs of equal boxes at a constant distance by one box with an outer dimension."""
    folded: list[Strided] = []
    start = 0
    while start < len(boxes):
        first, end = boxes[start], start + 1
        if end < len(boxes):
            delta = tuple(b - a for a, b in zip(_starts(first), _starts(boxes[end]), strict=True))
            while (
                end < len(boxes)
                and boxes[end].sizes == first.sizes
                and _steps(boxes[end]) == _steps(first)
                and min(delta) >= 0
                and all(b - a == d for a, b, d in zip(_starts(boxes[end - 1]), _starts(boxes[end]), delta, strict=True))
            ):
                end += 1
        if end > start + 1:
            source, target, index = delta
            first = Strided(
                (end - start, *first.sizes),
                first.source_start,
                (source, *first.source_strides),
                first.target_start,
                (target, *first.target_strides),
                first.index_start,
                (index, *first.index_strides),
            )
        folded.append(first)
        start = end
    return folded
