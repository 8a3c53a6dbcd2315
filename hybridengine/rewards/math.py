"""Mathematical equivalence by math-verify, on any thread and bounded in time.

math-verify bounds its own time with ``signal.alarm``, which only works on the main thread and never interrupts
a loop inside C code. Here its limits are off; the work is done in a child process, one per thread that scores at
the same time, and a child that exceeds the limit is killed and replaced. The limit covers the comparison alone,
not the start of a child.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from typing import IO, Any

logger = logging.getLogger(__name__)

STARTUP_SECONDS = 120.0  # importing sympy and building its parsers, on a busy machine


def math_reward(prompt: str, response: str, answer: Any, *, limit_seconds: float = 5.0) -> float:
    r"""1 if the response's final answer equals ``answer`` mathematically (LaTeX or plain), else 0.

    ``\boxed{...}`` has precedence over other expressions in the response. An answer that can't be parsed or
    compared within ``limit_seconds`` counts as wrong; how often that happened is in :data:`verifier`.

    Raises:
        ValueError: no ground truth, or one that math-verify can't parse.
    """
    if answer is None:
        raise ValueError("math needs the row's answer, which is None; see data.answer_key")
    return verifier.score(response, str(answer), limit_seconds=limit_seconds)


class MathVerifier:
    """Child processes that compare answers.

    Attributes:
        num_timeouts: comparisons given up because they took too long.
    """

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._all: set[_Child] = set()
        self.num_timeouts = 0
        atexit.register(self.close)

    def score(self, response: str, answer: str, *, limit_seconds: float) -> float:
        """1.0 if equivalent, 0.0 if not or if it took longer than ``limit_seconds``."""
        child = self._take()
        try:
            reply = child.ask({"response": response, "answer": answer}, limit_seconds)
        except BaseException:
            self._discard(child)
            raise
        if reply is None:
            self._discard(child)
            with self._lock:
                self.num_timeouts += 1
            logger.warning("math: gave up after %s s on %r (answer %r)", limit_seconds, response[-200:], answer)
            return 0.0
        self._idle.put(child)
        if "error" in reply:
            raise ValueError(reply["error"])
        return float(reply["score"])

    def warm_up(self) -> None:
        """Start a first child, without waiting for it."""
        self._idle.put(self._take())

    def close(self) -> None:
        """Kill the children."""
        with self._lock:
            children = list(self._all)
            self._idle = queue.LifoQueue()
        for child in children:
            self._discard(child)

    def _take(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            child = _Child()
            with self._lock:
                self._all.add(child)
            return child

    def _discard(self, child: _Child) -> None:
        child.kill()
        with self._lock:
            self._all.discard(child)


class _Child:
    """One process of ``hybridengine.rewards.math_worker``: a JSON line in, a JSON line out."""

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("reward math needs the package math-verify (pip install 'math-verify[antlr4_9_3]')")
        # A separate interpreter, not a fork: this process has threads, and perhaps a GPU.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridengine.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._buffer = b""
        self._ready = False

    def ask(self, request: dict[str, str], limit_seconds: float) -> dict[str, Any] | None:
        """The child's reply; None when it did not come in time."""
        if not self._ready and self._read_line(STARTUP_SECONDS) is None:
            raise RuntimeError(f"the math worker did not start within {STARTUP_SECONDS:g} s")
        self._ready = True
        self._pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
        self._pipe(self._process.stdin).flush()
        line = self._read_line(limit_seconds)
        return None if line is None else json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # an unsent request to a killed child
                    pass

    def _read_line(self, limit_seconds: float) -> bytes | None:
        stdout = self._pipe(self._process.stdout)
        deadline = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(stdout.fileno(), 65536)
                if not chunk:
                    raise RuntimeError(f"the math worker ended unexpectedly (status {self._process.wait()})")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


verifier = MathVerifier()
