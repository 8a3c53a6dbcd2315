"""SIGTERM and SIGINT: finish the step, save, exit 0."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from hybridengine.process_control import ancestors, is_python, signal_when_parent_ends

if TYPE_CHECKING:
    import torch

#: A scheduler signals launcher and ranks, and the launcher its ranks: what comes within this is the same request.
REPEAT_SECONDS = 5.0


class Interrupt:
    """Remembers a signal; the ranks agree on it between steps, so all stop after the same one.

    Another signal within ``REPEAT_SECONDS`` is taken for the same request. A later one acts at once, as it would
    without this handler.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.status = 0  # that the program should exit with, once the ranks have agreed to stop
        self._asked = 0
        self._at = 0.0
        self._previous = {s: signal.signal(s, self._remember) for s in (signal.SIGTERM, signal.SIGINT)}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            sys.stderr.write(f"{signal.Signals(number).name}: finishing this step, then saving and stopping\n")
        elif time.monotonic() - self._at > REPEAT_SECONDS:
            signal.signal(number, self._previous[signal.Signals(number)])
            os.kill(os.getpid(), number)

    def stop(self, status: int) -> None:
        """Stop as after a signal, but exit with ``status``; known to all ranks with the next :meth:`agreed`."""
        self._asked = status

    def agreed(self) -> bool:
        """Collective: whether any rank was interrupted."""
        import torch
        import torch.distributed as dist

        flag: torch.Tensor = torch.tensor([self._asked + 1 if self._asked else int(self.received is not None)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.status = max(0, int(flag.item()) - 1)
        return bool(flag.item())


def die_with_launcher() -> None:
    """A rank whose torchrun is killed is asked to stop (SIGTERM): it saves, rather than train on as an orphan.

    Does nothing without torchrun, whose place a shell has that may well end before the run.

    Raises:
        SystemExit: torchrun ended before this call; the ranks would wait for its store until their time limit.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    signal_when_parent_ends(signal.SIGTERM)
    # Whoever adopts orphans is no interpreter: init, a service manager, a container's supervisor. Between torchrun and
    # a rank there may be a shell.
    if not any(is_python(pid) for pid in ancestors(os.getpid())):
        raise SystemExit(
            f"hybridengine: torchrun has ended, process {os.getppid()} has adopted this rank: it ends, too"
        )
