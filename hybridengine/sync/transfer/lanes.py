"""Lanes: box copies in steps that wait for other ranks' steps, through words of shared control pages.

What they are; ``host_pipeline.py`` and ``device_pipeline.py`` run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridengine.sync.transfer.control import Word
from hybridengine.sync.transfer.tables import BoxTable

#: Progress inside a generation: after step k (from 0) a signal holds (generation << SHIFT) + k + 1.
GENERATION_SHIFT = 24


class Gate(NamedTuple):
    """Opens once each rank's word counts ``steps`` steps of this generation."""

    words: Mapping[int, Word]
    steps: int

    def closed(self, base: int) -> set[int]:
        """Ranks that it is still waiting for."""
        return {rank for rank, word in self.words.items() if word.get() < base + self.steps}


class Lane(NamedTuple):
    """Steps in order. Step k runs boxes ``bounds[k]`` to ``bounds[k + 1]`` of the table when ``gates[k]`` is open,
    and says so in ``signal``."""

    table: BoxTable
    bounds: Sequence[int]
    gates: Sequence[Gate]
    signal: Word
