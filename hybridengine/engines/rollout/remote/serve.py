"""The engine's process: ``python -m hybridengine.engines.rollout.remote.serve <descriptor>``.

Started by :mod:`processes` with one end of a socket pair. Builds the host that the first message names and then runs
calls, one at a time, until the other end closes. An error in a call is sent to the caller; the process dies
only with its engine, with its trainer, or when one of the engine's own processes does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hybridengine.engines.rollout.base import EngineLostError
from hybridengine.engines.rollout.remote.messages import Call, Channel, Failure, Job, Output, Result, Start
from hybridengine.engines.rollout.remote.shared_weights import SharedWeightsHandle
from hybridengine.plugins import load_object
from hybridengine.process_control import die_with
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice


class Host(Protocol):
    """An engine at the process's end of the channel, built from a Start. Its workers are its tensor-parallel ranks.

    The trainer's side keeps versions, staleness and which tags are awake; a host keeps none of them.
    """

    def children(self) -> Sequence[int]:
        """Ids of the engine's own processes: when one of them dies, the engine is lost."""
        ...

    def describe(self) -> dict[str, int]:
        """Bytes per worker of ``kv_cache``."""
        ...

    def shared_weights(self) -> list[SharedWeightsHandle]:
        """Where each worker's weights are."""
        ...

    def layout(self, params: Mapping[str, ParamSpec]) -> list[tuple[TensorSlice, ...]]:
        """What each worker's weights hold, from the engine's own loader."""
        ...

    def advance(self, job: Job | None) -> list[Output]:
        """Take in a job's samples, run for a moment; what is new since the last call."""
        ...

    def abort(self, names: Sequence[str]) -> list[Output]:
        """End samples early; tokens of theirs that were not reported."""
        ...

    def begin_update(self) -> None:
        """The weights are about to be written."""
        ...

    def finish_update(self, version: int) -> None:
        """The weights have been written: rebuild what is derived from them, drop caches of older ones."""
        ...

    def sleep(self, tags: Sequence[str]) -> None: ...

    def wake(self, tags: Sequence[str]) -> None: ...

    def checksums(self) -> list[dict[str, int]]:
        """Per worker: byte sum of each of its weights (mod 2**64), read by the engine itself."""
        ...

    def close(self) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    descriptor = int((sys.argv[1:] if arguments is None else arguments)[0])
    channel = Channel(socket.socket(fileno=descriptor))
    os.set_inheritable(descriptor, False)
    start: Start = channel.receive()
    die_with(start.trainer_pid)
    try:
        host: Host = load_object(start.host, "rollout.engine")(start)
    except Exception as error:  # noqa: BLE001  the trainer raises it
        sys.excepthook(type(error), error, error.__traceback__)
        channel.send(Failure(type(error).__name__, str(error)))
        return 1
    watch(host.children())
    channel.send(Result(os.getpid()))
    try:
        serve(host, channel)
    except EngineLostError:
        pass  # the trainer is gone, or has let go
    host.close()
    return 0


def serve(host: Host, channel: Channel) -> None:
    """Answer calls until the other end closes (EngineLostError)."""
    while True:
        call: Call = channel.receive()
        try:
            answer: object = Result(getattr(host, call.method)(**call.arguments))
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001  the trainer raises it
            sys.excepthook(type(error), error, error.__traceback__)
            answer = Failure(type(error).__name__, str(error))
        channel.send(answer)


def watch(children: Iterable[int]) -> None:
    """End the process, with a message, as soon as one of ``children`` has died: a call might wait for it for ever."""
    pids = list(children)

    def look() -> None:
        while True:
            for pid in pids:
                if not _lives(pid):
                    sys.stderr.write(f"engine process {pid} of {os.getpid()} is gone\n")
                    sys.stderr.flush()
                    os.killpg(0, signal.SIGKILL)
            time.sleep(0.5)

    if pids:
        threading.Thread(target=look, name="engine-watch", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
