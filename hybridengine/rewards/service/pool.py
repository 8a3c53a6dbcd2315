"""The trainer's side of the workers: start one, ask it something for a limited time, kill it.

Why not a process pool from a library: those unpickle what a worker sends (here it may have evaluated text that a model
wrote), import the trainer's main module again in each worker, or can't stop one task without losing the others.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridengine.process_control import seconds_without_core
from hybridengine.rewards.service.wire import LARGEST_REPLY, BrokenWorkerError, FrameReader, send_frame
from hybridengine.rewards.service.worker import Request

#: Loading libraries and starting, on a busy machine.
STARTUP_SECONDS = 180.0
#: Of workers: the rollout engine's threads come first where both want the same core.
NICE = 10
#: A call may be stretched by waiting for a core up to this many times its limit.
STRETCH = 10.0
#: Libraries with thread pools of their own would start them before the fork.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class WorkerTimeoutError(RuntimeError):
    """The call took longer than it may; its worker has been killed."""


class ForkServerHandle:
    """Starts and kills workers through a fork server, which is itself started when first needed and when it has died.

    Args:
        preload: modules that the workers share.
        memory_bytes: private memory that one worker, and each process it starts, may have.
    """

    def __init__(self, preload: Sequence[str] = (), *, memory_bytes: int) -> None:
        self.preload, self.memory_bytes = sorted(set(preload)), memory_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the fork server; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the fork server, without waiting for it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def spawn(self) -> tuple[int, socket.socket]:
        """A new worker: its process id and the trainer's end of its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            message = {"do": "spawn", "memory": self.memory_bytes, "nice": NICE}
            for attempt in (1, 2):  # the second with a new fork server
                try:
                    return self._ask(message, [theirs.fileno()])["pid"], ours
                except OSError as error:
                    if attempt == 2:
                        ours.close()
                        raise BrokenWorkerError(f"no worker process can be started: {error}") from error
        raise AssertionError("not reached")

    def kill(self, pid: int) -> None:
        """Kill a worker, and what it has started."""
        with suppress(OSError):  # a fork server that is gone took its workers with it
            self._ask({"do": "kill", "pid": pid}, [])

    def close(self) -> None:
        """End the fork server and every worker, for good."""
        with self._lock:
            self._closed = True
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
                self._process.kill()
                self._process.wait()
            self._process = self._control = None

    def _ask(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise OSError("the fork server has been closed")
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
            content = self._control.recv(4096)
            if not content:
                assert self._process is not None
                self._process.wait()
                raise ConnectionResetError("the fork server ended")
            return dict(json.loads(content))

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(STARTUP_SECONDS)
        main = threading.current_thread() is threading.main_thread()
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            # A program of its own, not a fork: this process has threads, and perhaps a GPU.
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "hybridengine.rewards.service.forkserver",
                    str(theirs.fileno()), str(os.getpid() if main else 0), json.dumps(self.preload),
                ],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment,
            )  # fmt: skip
        self._control = ours


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    connection: socket.socket
    reader: FrameReader


class Worker:
    """One worker process, started with the first call and again after a death. For one thread at a time.

    Attributes:
        starts: processes started so far.
    """

    def __init__(self, server: ForkServerHandle) -> None:
        self.starts = 0
        self._server = server
        self._lock = threading.Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def ask(self, request: Request, limit_seconds: float) -> dict[str, Any]:
        """The reply to ``request``, see worker.answer.

        Time counts from the call, less what the worker spent waiting for a core while others had it.

        Raises:
            WorkerTimeoutError: it took longer than ``limit_seconds``.
            BrokenWorkerError: the process died, or answered nonsense.
        """
        if self._process is None:
            self._start()
        process = self._process
        if process is None:  # killed by another thread
            raise BrokenWorkerError("the process was stopped")
        try:
            began, waited = time.monotonic(), seconds_without_core(process.pid)
            send_frame(process.connection, pickle.dumps(request))
            deadline = began + limit_seconds
            while (content := process.reader.read(deadline)) is None:
                stretched = limit_seconds + seconds_without_core(process.pid) - waited
                deadline = began + min(stretched, STRETCH * limit_seconds)
                if time.monotonic() >= deadline:
                    raise WorkerTimeoutError(f"still running after {limit_seconds:g} s")
            return _checked(content, len(request.calls))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process; the next call starts another. May be called by another thread than the one that asks."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                process.connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            process.connection.close()
            self._server.kill(process.pid)

    def _start(self) -> None:
        pid, connection = self._server.spawn()
        with self._lock:
            self._process = _Process(pid, connection, FrameReader(connection, limit=LARGEST_REPLY))
        self.starts += 1


def _checked(content: bytes, samples: int) -> dict[str, Any]:
    """A reply of the right form; the worker may have been tampered with."""
    try:
        reply = json.loads(content)
        if "error" in reply:
            error = {name: str(reply["error"][name]) for name in ("kind", "message", "traceback")}
            return {"error": error | {"score": float(reply["error"]["score"])}}
        values = [
            (None if s is None else float(s), {str(k): float(v) for k, v in e.items()}) for s, e in reply["values"]
        ]
        if len(values) == samples:
            return {"values": values}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise BrokenWorkerError("the process answered with something that is no reply")


def new_server(preload: Sequence[str], memory_gib: float) -> ForkServerHandle:
    """A fork server for ``reward.memory_gib``."""
    return ForkServerHandle(preload, memory_bytes=int(memory_gib * 2**30))
