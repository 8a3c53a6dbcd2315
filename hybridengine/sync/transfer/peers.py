"""Survivors: a collective that breaks during a weight sync says which sync it was, and which ranks are gone.

torch.distributed reports a lost rank as a RuntimeError with a network address in it. The ranks of this node are
known better: each is watched through a descriptor of its process, which becomes readable when the process ends.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch.distributed as dist

from hybridengine.sync.transfer.base import PeerLostError, SyncReport
from hybridengine.sync.transfer.links import node_identity

#: How long a process whose connections have broken may take to be gone.
_ENDING_SECONDS = 1.0


class Survivors:
    """Collective to make: the processes of the other ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._processes: dict[int, int] = {}  # rank -> descriptor
        mine = node_identity(), os.stat("/proc/self/ns/pid").st_ino
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (mine, os.getpid()), group=group)
        for rank, (node, pid) in enumerate(everyone):
            if node == mine and pid != os.getpid():
                with suppress(OSError, AttributeError):  # a kernel or Python that has none: its end is not known here
                    self._processes[rank] = os.pidfd_open(pid)

    def gone(self) -> list[int]:
        """Ranks of this node whose process has ended. Waits a moment for the first one: connections close before."""
        poll = select.poll()
        ranks = {descriptor: rank for rank, descriptor in self._processes.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return sorted(ranks[descriptor] for descriptor, _ in poll.poll(1000 * _ENDING_SECONDS)) if ranks else []

    def close(self) -> None:
        """Safe to call twice."""
        for descriptor in self._processes.values():
            os.close(descriptor)
        self._processes = {}


def names_lost_ranks(sync: Callable[[Any, int], SyncReport]) -> Callable[[Any, int], SyncReport]:
    """Makes a handoff's ``sync`` raise PeerLostError, on every survivor, where a collective in it breaks.

    ``self.survivors.gone()`` tells it which ranks are. What else is raised stays what it is.
    """

    @wraps(sync)
    def named(self: Any, version: int) -> SyncReport:
        try:
            return sync(self, version)
        except RuntimeError as error:
            if not _is_broken_collective(error):
                raise
            match self.survivors.gone():
                case []:
                    lost = "a rank was lost or late (distributed.timeout_seconds); none of this node has ended"
                case [rank]:
                    lost = f"rank {rank} died"
                case ranks:
                    lost = f"ranks {ranks} have ended"
            raise PeerLostError(f"weight sync to policy version {version}: {lost}: {error}") from error

    return named


def _is_broken_collective(error: RuntimeError) -> bool:
    """Gloo raises plain RuntimeErrors that begin with the file they come from."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
