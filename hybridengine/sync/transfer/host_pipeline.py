"""Moves of a sync on the CPU: the rank's own slices, one pass per peer, then all lanes as their gates open.

A rank works on several lanes at once and never waits while one of them can move. The library takes the steps,
thousands of small ones in one call; without it Python does, one step at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from hybridengine import native
from hybridengine.platform.base import Sums
from hybridengine.sync.transfer.control import ControlPage, Waiter
from hybridengine.sync.transfer.lanes import GENERATION_SHIFT, Gate, Lane
from hybridengine.sync.transfer.region import MappedRegion
from hybridengine.sync.transfer.tables import BoxTable


class HostMoves:
    """One rank's part in a sync.

    Args:
        own: the rank's own slices.
        pulls: by peer, what is read from its shards where they are.
        lanes: what goes through staging rings.
        pages: every rank's control page, this one's included; empty for a rank that is alone.
        shards: the peers' mapped shards, where they are shared.
    """

    def __init__(
        self,
        own: BoxTable,
        pulls: Mapping[int, BoxTable],
        lanes: Sequence[Lane],
        waiter: Waiter,
        pages: Mapping[int, ControlPage],
        shards: Mapping[int, MappedRegion],
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._own, self._pulls, self._waiter, self._shards = own, pulls, waiter, shards
        self._page, self._lanes = pages.get(rank), Lanes(lanes)

    def run(self, generation: int, version: int, sums: Sums) -> None:
        """Publish this rank's shards and bring everything it needs to its engine; ``sums``: of what was moved.

        Raises:
            StaleGenerationError, PeerLostError: see Waiter.
        """
        if self._page is not None:
            self._page.publish(generation, version)
        self._own.run(sums)
        for rank, table in self._pulls.items():
            self._waiter.published(rank, generation, version)
            if rank in self._shards:
                self._shards[rank].wake()
            table.run(sums)
        self._lanes.run(generation, sums, self._waiter, "cast or read a staged chunk")

    def rest(self) -> None:
        """All ranks have read what they need."""
        for mapped in self._shards.values():
            mapped.rest()

    def close(self) -> None:
        """Nothing is held."""


class Lanes:
    """All lanes of one rank. Their gates are words of other ranks."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = list(lanes)
        self._rows = (native.LaneRow * len(self.lanes))()
        self._arrays: list[np.ndarray] = []  # what the rows point to
        for row, lane in zip(self._rows, self.lanes, strict=True):
            words = [[word.address for word in gate.words.values()] for gate in lane.gates]
            row.boxes = lane.table.boxes.ctypes.data
            row.box_bounds = self._keep(lane.bounds)
            row.words = self._keep([address for gate in words for address in gate])
            row.word_bounds = self._keep(np.cumsum([0, *map(len, words)]))
            row.marks = self._keep([gate.steps for gate in lane.gates])
            row.signal, row.steps, row.stores = lane.signal.address, len(lane.gates), lane.table.stores

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
        if by_library and native.load() is not None:
            assert sums is None or isinstance(sums, np.ndarray)
            return native.run_lanes(self._rows, base, sums)
        moved = True
        while moved:
            moved = False
            for row, lane in self._under_way():
                if not lane.gates[row.at].closed(base):
                    lane.table.run(sums, lane.bounds[row.at], lane.bounds[row.at + 1])
                    row.at += 1
                    lane.signal.set(base + row.at)
                    moved = True
        return not self._under_way()

    def _under_way(self) -> list[tuple[native.LaneRow, Lane]]:
        return [(row, lane) for row, lane in zip(self._rows, self.lanes, strict=True) if row.at < row.steps]


def _any_open(gates: Sequence[Gate], base: int) -> bool:
    return any(not gate.closed(base) for gate in gates)
