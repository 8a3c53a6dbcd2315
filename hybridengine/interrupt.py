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
        self._previous = {s: signal.signal(s, self._remember) for s in (signal.SIGTERM, signal.SIGINT)}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        sys.stderr.write(f"{signal.Signals(number).name}: finishing this step, then saving and stopping\n")
        signal.signal(number, self._previous[signal.Signals(number)])

    def agreed(self) -> bool:
        """Collective: whether any rank was interrupted."""
        flag = torch.tensor([int(self.received is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
