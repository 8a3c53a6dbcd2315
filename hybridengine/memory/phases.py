"""A run's phases: each is timed; those with needs also bring their owners onto the device and measure memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridengine import platform
from hybridengine.distributed.errors import agree
from hybridengine.memory.residency import Phase, Residency, State
from hybridengine.memory.tracker import MemoryTracker
from hybridengine.tracing import PhaseTimer


class Phases:
    """``with phases(name):`` times what runs inside; ``with phases(name, needs):`` also moves memory first.

    Moving counts as part of the phase and is shown on its own as ``time/<phase>/move``. Nothing is agreed and nothing
    timed when everything is in place already.

    Attributes:
        timer, tracker, residency: the parts, for whoever needs one alone.
    """

    def __init__(self, timer: PhaseTimer, tracker: MemoryTracker, residency: Residency) -> None:
        self.timer, self.tracker, self.residency = timer, tracker, residency
        self._needed: dict[str, int] = {}  # phase -> its largest peak without anything fetched early
        self._fetched = False

    @classmethod
    def over(cls, residency: Residency, timer: PhaseTimer, device: torch.device) -> Phases:
        """Phases that measure the owners of ``residency``, on the device and elsewhere."""
        tracker = MemoryTracker(device, lambda: (residency.sizes(), residency.sizes(on=State.HOST)))
        return cls(timer, tracker, residency)

    @contextmanager
    def __call__(self, name: str, needs: Phase | None = None) -> Iterator[None]:
        """Raises what a mover raised, on that rank, and PeerError on the others."""
        if needs is None:
            with self.timer.phase(name):
                yield
            return
        self._fetched = False
        with self.timer.phase(name), self.measured(name):
            self.prepare(needs)
            yield

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Memory alone, under ``name``."""
        with self.tracker.phase(name) as used:
            yield
        if not self._fetched:
            self._needed[name] = max(self._needed.get(name, 0), used.peak)

    def prepare(self, needs: Phase) -> None:
        """Collective: bring memory into place for a phase."""
        if self.residency.ready(needs):
            self.residency.enter(needs)
            return
        with self.timer.phase("move"), agree(f"making room for {needs.name}"):
            self.residency.enter(needs)

    def prefetch(self, owner: str, *, during: str) -> None:
        """Start bringing ``owner`` back while phase ``during`` is running, where that leaves it enough memory.

        Enough: the GPU holds the owner on top of the largest peak that this phase has had so far. So the first run
        of a phase never fetches, and a fetch never makes a phase fail that would have fitted.
        """
        residency = self.residency
        if owner not in residency.movers or residency[owner] is not State.HOST:
            return
        memory = platform.of(self.tracker.device).memory(self.tracker.device)
        if memory is not None:
            if during not in self._needed or self._needed[during] + residency.movers[owner].nbytes() > memory.total:
                return
        self._fetched = True
        residency.prefetch(owner)
