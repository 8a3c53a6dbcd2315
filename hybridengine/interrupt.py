"""SIGTERM and SIGINT: finish the step, save, exit 0."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import torch
import torch.distributed as dist


class Interrupt:
    """Remembers a signal; the ranks agree on it between steps, so all stop after the same one.

    A second signal of the same kind kills at once, as it would without this handler.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.status = 0  # that the program should exit with, once the ranks have agreed to stop
        self._asked = 0
        self._previous = {s: signal.signal(s, self._remember) for s in (signal.SIGTERM, signal.SIGINT)}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        sys.stderr.write(f"{signal.Signals(number).name}: finishing this step, then saving and stopping\n")
        signal.signal(number, self._previous[signal.Signals(number)])

    def stop(self, status: int) -> None:
        """Stop as after a signal, but exit with ``status``; known to all ranks with the next :meth:`agreed`."""
        self._asked = status

    def agreed(self) -> bool:
        """Collective: whether any rank was interrupted."""
        flag = torch.tensor([self._asked + 1 if self._asked else int(self.received is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.status = max(0, int(flag.item()) - 1)
        return bool(flag.item())
