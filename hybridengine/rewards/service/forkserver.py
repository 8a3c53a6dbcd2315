"""The process from which workers are forked: it has the libraries loaded, so that a worker starts in milliseconds.

    python -m hybridengine.rewards.service.forkserver FD PARENT PRELOAD

Single-threaded, and never runs a reward function: what a worker did to its own memory is gone with the worker. It takes
messages on the socket FD, one JSON object each, and answers each with one:

    {"do": "spawn", "memory": bytes, "nice": n} + the worker's end of a socket   -> {"pid": n}
    {"do": "kill", "pid": n}                                                      -> {"killed": n}

It ends when the socket does, and its workers with it. What a worker has started and left behind becomes its child
(PR_SET_CHILD_SUBREAPER) and is killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from hybridengine.process_control import adopt_orphans, children, die_with
from hybridengine.rewards.service import worker

#: How often processes that ended by themselves are looked for, milliseconds.
SWEEP_MS = 500


def main() -> None:
    """PARENT is the trainer's process, 0 when the thread that starts this may end before it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    if (parent := int(sys.argv[2])) != 0:
        die_with(parent)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole job; the trainer decides what they mean
        signal.signal(number, _ignore)
    for module in json.loads(sys.argv[3]):
        importlib.import_module(module)
    gc.freeze()  # a collection in a worker would copy the pages that all of them share
    ForkServer(control).serve()


def _ignore(number: int, frame: object) -> None:
    """A handler, unlike SIG_IGN, is not inherited by the programs that a worker starts."""


class ForkServer:
    """Answers messages on ``control`` until its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: set[int] = set()

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            if poll.poll(SWEEP_MS):
                content, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
                if not content:
                    break
                answer = self._handle(json.loads(content), descriptors)
                self._control.send(json.dumps(answer).encode())
            self._sweep()
        for pid in list(self._workers):
            self._kill(pid)
        self._sweep()

    def _handle(self, message: dict[str, int], descriptors: list[int]) -> dict[str, int]:
        if message["do"] == "spawn":
            return {"pid": self._spawn(descriptors[0], memory=message["memory"], nice=message["nice"])}
        self._kill(message["pid"])
        return {"killed": message["pid"]}

    def _spawn(self, descriptor: int, *, memory: int, nice: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                worker.run(socket.socket(fileno=descriptor), parent=parent, memory=memory, nice=nice)
            finally:
                os._exit(1)
        os.close(descriptor)
        self._workers.add(pid)
        return pid

    def _kill(self, pid: int) -> None:
        if pid in self._workers:  # otherwise it has been reaped, and the number may be another process's
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self._workers.discard(pid)

    def _sweep(self) -> None:
        """Reap what has ended, kill what is nobody's any more."""
        while True:
            for pid in set(children(os.getpid())) - self._workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._workers.discard(pid)


if __name__ == "__main__":
    main()
