"""From one pattern to another: which rank reads which box from whom. Pure integers, no names.

This is the geometric core of the planner. It runs once per pair of patterns, not once per parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridengine.sync.plan.boxes import Box, contiguous_strides, counts, intersect, subtract, volume
from hybridengine.sync.plan.spec import Pattern, Piece
from hybridengine.sync.plan.strided import Strided, coalesce


class Move(NamedTuple):
    """``target_rank`` reads ``box`` of its tensor ``target_slot`` from ``source_slot`` of ``source_rank``."""

    source_rank: int
    target_rank: int
    source_slot: int
    target_slot: int
    box: Strided


class Pairing(NamedTuple):
    """Moves of one pattern pair. ``choices`` is the largest number of ranks a remote box could come from."""

    moves: tuple[Move, ...]
    choices: int


class UncoveredError(ValueError):
    """The target holds elements that no source rank has."""


def pair(
    source: Pattern,
    target: Pattern,
    *,
    loads: list[int] | None = None,
    turn: int = 0,
    node_of: Sequence[int] | None = None,
) -> Pairing:
    """Plan every rank's reads: its own bytes first, the rest from the least loaded holder.

    Args:
        loads: elements each rank already sends; updated. Passing the same list to consecutive calls
            spreads what several ranks hold evenly over them.
        turn: rotates which holder wins a tie, so that repeated layers take turns.
        node_of: node index of each rank; holders on the reader's node are preferred over the others.

    Raises:
        UncoveredError: part of the target is held by no source rank.
    """
    world = len(target.ranks)
    loads = [0] * world if loads is None else loads
    holders = _holders(source)
    grouped: dict[tuple[int, int, int, int], list[Strided]] = defaultdict(list)
    index_strides = contiguous_strides(target.shape)
    overlaps = _Overlaps(holders, len(target.shape))
    choices = 1
    for rank, pieces in enumerate(target.ranks):
        for piece in pieces:
            for part, candidates in _cover(piece.box, overlaps, rank):
                if rank in candidates:
                    chosen = rank
                else:
                    choices = max(choices, len(candidates))
                    chosen = _lightest(candidates, rank, loads, turn, node_of)
                    loads[chosen] += volume(part)
                origin = candidates[chosen]
                key = (rank, chosen, origin.slot, piece.slot)
                grouped[key].append(_strided(part, origin, piece, index_strides))
    moves = tuple(
        Move(chosen, rank, source_slot, target_slot, box)
        for (rank, chosen, source_slot, target_slot), found in sorted(grouped.items())
        for box in coalesce(found)
    )
    return Pairing(moves, choices)


def missing_elements(shape: Sequence[int], held: Sequence[Piece], needed: Sequence[Box]) -> int:
    """How many elements of the union of ``needed`` are in none of ``held``: ``|B_r \\ A_r|`` of one rank.

    Counted without looking at any plan: by subtraction for single boxes, on a grid of cells otherwise.
    """
    owned = [piece.box for piece in held]
    if len(needed) <= 1 and len(owned) <= 1:
        common = intersect(needed[0], owned[0]) if needed and owned else None
        return sum(volume(box) for box in needed) - (volume(common) if common else 0)
    edges = [
        np.unique([0, size, *(e for o, s in (*owned, *needed) for e in (o[dim], o[dim] + s[dim]))])
        for dim, size in enumerate(shape)
    ]
    cells = np.ones((), dtype=np.int64)
    for edge in edges:
        cells = np.multiply.outer(cells, np.diff(edge))
    return int((cells * (_marked(edges, needed) & ~_marked(edges, owned))).sum())


def _marked(edges: Sequence[np.ndarray], boxes: Sequence[Box]) -> np.ndarray:
    grid = np.zeros([len(edge) - 1 for edge in edges], dtype=bool)
    for offsets, sizes in boxes:
        grid[
            tuple(
                slice(int(np.searchsorted(e, o)), int(np.searchsorted(e, o + s)))
                for e, o, s in zip(edges, offsets, sizes, strict=True)
            )
        ] = True
    return grid


def _holders(pattern: Pattern) -> dict[Box, dict[int, Piece]]:
    """Each distinct box, and one piece per rank that holds exactly it."""
    holders: dict[Box, dict[int, Piece]] = {}
    for rank, pieces in enumerate(pattern.ranks):
        for piece in pieces:
            holders.setdefault(piece.box, {}).setdefault(rank, piece)
    return holders


class _Overlaps:
    """Which source boxes meet a target box; worked out once per distinct target box."""

    def __init__(self, holders: dict[Box, dict[int, Piece]], ndim: int) -> None:
        self._boxes, self._holders = list(holders), holders
        self._low = np.array([box[0] for box in holders], dtype=np.int64).reshape(len(holders), ndim)
        self._high = self._low + np.array([box[1] for box in holders], dtype=np.int64).reshape(len(holders), ndim)
        self._known: dict[Box, tuple[list[tuple[Box, dict[int, Piece]]], bool]] = {}

    def __call__(self, box: Box) -> tuple[list[tuple[Box, dict[int, Piece]]], bool]:
        """The common parts with their holders, and whether they cut ``box`` up exactly."""
        if box not in self._known:
            low, size = np.array(box[0], dtype=np.int64), np.array(box[1], dtype=np.int64)
            meets = np.logical_and(self._low < low + size, self._high > low).all(axis=1)
            parts = []
            for found in np.flatnonzero(meets).tolist():
                part = intersect(box, self._boxes[found])
                assert part is not None
                parts.append((part, self._holders[self._boxes[found]]))
            exact = sum(volume(part) for part, _ in parts) == volume(box) and (
                len(parts) < 2 or int(_cells(box, [part for part, _ in parts]).max()) == 1
            )
            self._known[box] = parts, exact
        return self._known[box]


def _cells(box: Box, parts: Sequence[Box]) -> np.ndarray:
    inside = [(tuple(o - b for o, b in zip(offsets, box[0], strict=True)), sizes) for offsets, sizes in parts]
    return counts(box[1], inside)


def _cover(box: Box, overlaps: _Overlaps, rank: int) -> list[tuple[Box, dict[int, Piece]]]:
    """Cut ``box`` into disjoint parts, each inside one source box; what ``rank`` holds itself comes first."""
    parts, exact = overlaps(box)
    if exact:
        return parts
    # Source boxes overlap each other: take them one after another, own boxes first, then the largest.
    rest, taken = [box], []
    for part, candidates in sorted(parts, key=lambda item: (rank not in item[1], -volume(item[0]), item[0])):
        kept = []
        for piece in rest:
            common = intersect(piece, part)
            if common is None:
                kept.append(piece)
            else:
                taken.append((common, candidates))
                kept += subtract(piece, common)
        rest = kept
    if rest:
        raise UncoveredError(f"elements {rest[0][0]} + {rest[0][1]} are held by no source rank")
    return taken


def _lightest(
    candidates: dict[int, Piece], rank: int, loads: Sequence[int], turn: int, node_of: Sequence[int] | None
) -> int:
    world = len(loads)
    return min(
        candidates,
        key=lambda c: (
            node_of is not None and node_of[c] != node_of[rank],
            loads[c],
            (c - rank - turn) % world,
        ),
    )


def _strided(part: Box, origin: Piece, piece: Piece, index_strides: tuple[int, ...]) -> Strided:
    offsets, sizes = part
    return Strided(
        sizes,
        origin.start + sum((o - b) * s for o, b, s in zip(offsets, origin.offsets, origin.strides, strict=True)),
        origin.strides,
        piece.start + sum((o - b) * s for o, b, s in zip(offsets, piece.offsets, piece.strides, strict=True)),
        piece.strides,
        sum(o * s for o, s in zip(offsets, index_strides, strict=True)),
        index_strides,
    )
