"""Starting engine processes, calling them, and noticing within a second that one has died."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridengine.engines.rollout.base import EngineLostError
from hybridengine.engines.rollout.remote.messages import Call, Channel, Failure, Result, Start

#: What torchrun and our own process group left in the environment; an engine process is none of that job's ranks.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
                  "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_LOG_LINES = 20
#: With several processes, how long the others may go on once one has failed: they may be waiting for it for ever.
_GRACE_SECONDS = 10.0


class EngineProcesses:
    """The processes of one replica, each in a session of its own: what kills them can't reach the trainer.

    Args:
        python: interpreter of the engine's environment.
        start: (process number, directory for the processes' files) -> its first message.
        count: how many processes.
        environment: variables set for the engine on top of this process's own.
        answer_seconds: longest wait for an answer to anything but starting.

    Raises:
        EngineLostError: a process died while it started; the message ends with its last log lines.
        ValueError, RuntimeError: the engine refused to start.
    """

    def __init__(
        self,
        python: Path,
        start: Callable[[int, Path], Start],
        count: int,
        environment: Mapping[str, str],
        *,
        answer_seconds: float,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hybridengine-engine-"))
        self._children: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._death: str | None = None
        self._answer_seconds = answer_seconds
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED and not k.startswith("TORCHELASTIC_")}
        try:
            for rank in range(count):
                self._spawn(python, start(rank, self._directory), kept | dict(environment))
            self._answers("start")
        except BaseException:
            self.kill()
            raise

    def _spawn(self, python: Path, start: Start, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(self._log(start.rank), "wb") as log:
            child = subprocess.Popen(
                [str(python), "-m", "hybridengine.engines.rollout.remote.serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._children.append(child)
        self._channels.append(Channel(ours))
        self._channels[-1].send(start)

    @property
    def lost(self) -> bool:
        """Whether they are known to be dead."""
        return self._death is not None

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Run ``method`` in every process; the answers in order.

        Raises:
            EngineLostError: a process died (all are dead then).
            the method's own error, with its class and text.
        """
        if self._death is not None:
            raise EngineLostError(self._death)
        message = Call(method, arguments)
        try:
            for channel in self._channels:
                channel.send(message)
        except EngineLostError:
            self._die()
        return self._answers(method)

    def _answers(self, method: str) -> list[Any]:
        """Every process's answer to ``method``. Starting has no time limit; everything else has."""
        limit = float("inf") if method == "start" else time.monotonic() + self._answer_seconds
        answers: list[Any] = [None] * len(self._channels)
        waiting = selectors.DefaultSelector()
        for i, channel in enumerate(self._channels):
            waiting.register(channel.link, selectors.EVENT_READ, i)
        while waiting.get_map():
            for key, _ in waiting.select(0.5):
                i = key.data
                try:
                    message = self._channels[i].receive()
                except EngineLostError:
                    self._die()
                answers[i] = message
                waiting.unregister(key.fileobj)
                if isinstance(message, Failure):
                    limit = min(limit, time.monotonic() + _GRACE_SECONDS)
            if any(child.poll() is not None for child in self._children):
                self._die()
            if waiting.get_map() and time.monotonic() > limit:
                self._die(f" or did not answer {method} in time")
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error()
        assert all(isinstance(answer, Result) for answer in answers)
        return [answer.value for answer in answers]

    def _die(self, otherwise: str = "") -> None:
        """Kill what is left and build the error that describes what happened.

        Raises:
            EngineLostError: always.
        """
        time.sleep(0.2)  # a process that is going down writes its last lines
        states = ", ".join(f"{child.pid} {_how(child.poll())}" for child in self._children)
        self._kill_all()
        text = "\n".join(self.last_lines())
        self.kill()
        self._death = f"an engine process died{otherwise} (processes: {states}). Its last log lines:\n{text}"
        raise EngineLostError(self._death)

    def last_lines(self) -> list[str]:
        """The end of every process's log."""
        lines: list[str] = []
        for i in range(len(self._children)):
            with contextlib.suppress(OSError):
                text = self._log(i).read_text(errors="replace").splitlines()[-_LOG_LINES:]
                lines += [f"  [{i}] {line}" for line in text]
        return lines

    def close(self) -> None:
        """Close the connections, give the processes a moment to end by themselves, then kill them."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(child.poll() is None for child in self._children):
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill the processes and everything they started, and reap them."""
        self._death = self._death or "the engine's processes were ended"
        self._kill_all()
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _kill_all(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # it leads its session: the group outlives it
            child.wait()

    def _log(self, rank: int) -> Path:
        return self._directory / f"{rank}.log"


def _how(status: int | None) -> str:
    if status is None:
        return "was alive"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
