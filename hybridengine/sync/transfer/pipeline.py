"""Lanes: box copies in steps that wait for other ranks' steps, through words of shared control pages.

A rank works on several lanes at once and never waits while one of them can move. On the CPU the library takes the
steps, thousands of small ones in one call; elsewhere, and without the library, Python does, one step at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hybridengine import native, platform
from hybridengine.sync.transfer.control import Waiter, Word
from hybridengine.sync.transfer.tables import BoxTable, Sums

#: Progress inside a generation: after step k (from 0) a signal holds (generation << SHIFT) + k + 1.
GENERATION_SHIFT = 24


class Gate(NamedTuple):
    """Opens once each rank's word counts ``steps`` steps of this generation."""

    words: Mapping[int, Word]
    steps: int

    def closed(self, base: int) -> set[int]:
        """Ranks that it is still waiting for."""
        return {rank for rank, word in self.words.items() if word.get() < base + self.steps}


class Lane:
    """Steps in order. Step k runs boxes ``bounds[k]`` to ``bounds[k + 1]`` of the table when ``gates[k]`` is open,
    and says so in ``signal``."""

    def __init__(self, table: BoxTable, bounds: Sequence[int], gates: Sequence[Gate], signal: Word) -> None:
        self.table, self.bounds, self.gates, self.signal = table, tuple(bounds), tuple(gates), signal

    def __len__(self) -> int:
        return len(self.gates)

    def step(self, at: int, base: int, sums: Sums) -> None:
        self.table.run(sums, self.bounds[at], self.bounds[at + 1])
        self.table.finish()
        self.signal.set(base + at + 1)


class Lanes:
    """All lanes of one rank. Their gates are words of other ranks."""

    def __init__(self, lanes: Sequence[Lane], device: torch.device) -> None:
        self.lanes, self._device = list(lanes), device
        self._rows = (native.LaneRow * len(self.lanes))()
        self._arrays: list[np.ndarray] = []  # what the rows point to
        for row, lane in zip(self._rows, self.lanes, strict=True):
            words = [[word.address for word in gate.words.values()] for gate in lane.gates]
            row.boxes = lane.table.boxes.ctypes.data
            row.box_bounds = self._keep(lane.bounds)
            row.words = self._keep([address for gate in words for address in gate])
            row.word_bounds = self._keep(np.cumsum([0, *map(len, words)]))
            row.marks = self._keep([gate.steps for gate in lane.gates])
            row.signal, row.steps, row.stores = lane.signal.address, len(lane), lane.table.stores

    def _keep(self, values: Sequence[int] | np.ndarray) -> int:
        self._arrays.append(np.array(values, np.int64))
        return int(self._arrays[-1].ctypes.data)

    def run(self, generation: int, sums: Sums, waiter: Waiter, what: str) -> None:
        """Take all steps of one generation. ``what``: what they do, for the message if a rank is lost.

        Raises:
            PeerLostError: a rank that this one waits for died, gave up or did not answer in time.
        """
        base = generation << GENERATION_SHIFT
        for row, lane in zip(self._rows, self.lanes, strict=True):
            row.at = 0
            if not isinstance(sums, torch.Tensor):
                native.check_boxes(lane.table.boxes, sums)
        while not self._advance(base, sums):
            gates = [lane.gates[row.at] for row, lane in self._under_way()]
            # One of them may have opened since: then nobody is waited for, and it goes on.
            ranks = set[int]().union(*(gate.closed(base) for gate in gates))
            waiter.until(partial(_any_open, gates, base), ranks=ranks, generation=generation, what=what)

    def _advance(self, base: int, sums: Sums, *, by_library: bool = True) -> bool:
        """As far as it goes without waiting; whether that is the end."""
        if by_library and not platform.of(self._device).separate_memory and native.load() is not None:
            assert sums is None or isinstance(sums, np.ndarray)
            return native.run_lanes(self._rows, base, sums)
        moved = True
        while moved:
            moved = False
            for row, lane in self._under_way():
                if not lane.gates[row.at].closed(base):
                    lane.step(row.at, base, sums)
                    row.at += 1
                    moved = True
        return not self._under_way()

    def _under_way(self) -> list[tuple[native.LaneRow, Lane]]:
        return [(row, lane) for row, lane in zip(self._rows, self.lanes, strict=True) if row.at < row.steps]


def _any_open(gates: Sequence[Gate], base: int) -> bool:
    return any(not gate.closed(base) for gate in gates)
