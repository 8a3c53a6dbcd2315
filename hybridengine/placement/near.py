"""Warn, once per phase, when a phase has nearly run out of memory."""

from __future__ import annotations

import logging
import math
import time

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.memory.host import available_host_memory
from hybridengine.memory.tracker import PhaseMemory
from hybridengine.placement.oom import advice, size_text

log = logging.getLogger(__name__)

#: A phase whose peak leaves less than this share of what the job can have is warned about.
SHARE = 0.04
#: Seconds between two checks of a phase: asking the kernel costs 0.2 ms, which a small model's steps would feel.
SECONDS = 1.0


class NearLimit:
    """Called by MemoryTracker after every phase; warns once when little was left. On a CPU one rank per node warns."""

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self._next: dict[str, float] = {}  # phase -> when to look again

    def __call__(self, run: PhaseMemory) -> None:
        now = time.monotonic()
        reports = self._world.platform.separate_memory or self._world.local_rank == 0
        if now < self._next.get(run.name, 0.0) or not reports:
            return
        self._next[run.name] = now + SECONDS
        left, total = self.left(run)
        if left < SHARE * total:
            self._next[run.name] = math.inf
            first = (
                f"nearly out of memory in phase {run.name!r}: {size_text(max(0, left))} of {size_text(total)} "
                "were left at its peak"
            )
            log.warning("%s", "\n".join([first, *advice(run.name, run.owners, self._config, run.asleep)]))

    def left(self, run: PhaseMemory) -> tuple[int, int]:
        """(bytes left at the phase's peak, bytes that this job's ranks can have in all).

        On a GPU what torch merely keeps for later counts as left.
        """
        memory = self._world.platform.memory(self._world.device)
        if memory is not None:
            return memory.free + memory.cached, memory.total
        now, ranks = available_host_memory(), self._world.local_size  # which reach their peaks together
        return now - ranks * (run.peak - run.used), now + ranks * run.used
