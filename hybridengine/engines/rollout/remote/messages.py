"""Messages between trainer and engine process, and the socket that carries them.

A message is an 8-byte length and a pickle; both ends are started from the same installation by the same user over an
anonymous socket pair, so no other process can connect. Weights are not sent through it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.config import RolloutConfig
from hybridengine.engines.rollout.base import EngineLostError
from hybridengine.engines.rollout.streaming import Request
from hybridengine.types import SamplingParams, Trajectory

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message to a process: the engine to build.

    Attributes:
        host: "module:class" or "path.py:class" that builds it, see
            :class:`hybridengine.engines.rollout.remote.serve.Host`.
        rank: this process's number in the tensor-parallel group, where each rank has a process that we start.
        scratch: directory of the replica's processes, for what they tell each other in files; gone when they are.
        stop: token ids that end a sample.
        platform: name of the kind of device, see hybridengine.platform.
        trainer_pid: dies when this process does.
    """

    host: str
    model_path: Path
    rollout: RolloutConfig
    rank: int
    scratch: Path
    max_model_len: int
    seed: int
    stop: Sequence[int]
    trust_remote_code: bool
    platform: str
    timeout_seconds: float
    trainer_pid: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method of the host."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """Samples to generate with the same settings."""

    requests: list[Request]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one sample with their log-probabilities; ``reason`` is "stop" or "length" when it is finished."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Result:
    """A call's answer."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A call raised; ``kind`` is the exception's class name. The process goes on serving."""

    kind: str
    text: str

    def error(self) -> Exception:
        """The same error for the caller, as far as its class is one that callers look for."""
        kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
        kind = kinds.get(self.kind, RuntimeError)
        return kind(self.text if kind.__name__ == self.kind else f"{self.kind}: {self.text}")


class Channel:
    """One end of the socket pair. Not thread-safe."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def send(self, message: object) -> None:
        """Raises EngineLostError when the other end is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self.link.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EngineLostError(f"the other end of the engine's channel is gone ({error})") from None

    def receive(self) -> Any:
        """The next message. Raises EngineLostError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self.link.recv(min(count - len(parts), 2**20))
            except ConnectionError:
                part = b""
            if not part:
                raise EngineLostError("the other end of the engine's channel is gone")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.link.close()


def fill(trajectory: Trajectory, output: Output, version: int) -> None:
    """Append what an engine reports of a sample."""
    trajectory.token_ids += output.token_ids
    trajectory.logprobs += output.logprobs
    trajectory.versions += [version] * len(output.token_ids)
    if output.reason is not None:
        trajectory.truncated = output.reason == "length"
