"""Messages between ranks: any picklable object, in order, with bounded queues.

Sending returns once the receiver's thread has taken the message in, which it does for at most ``limit`` messages that
nobody has read yet: a sender can't run away from a reader. Two ends that both send without reading would wait for each
other, so one end of a pair has no limit and bounds what is on its way by other means (the controller: by admission).
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_GOODBYE = b""


class PeerGoneError(RuntimeError):
    """The other end closed its connection (its process ended or was killed), or has stopped taking messages."""


class Mailbox:
    """Both directions to and from ``peers`` (ranks of ``group``), each of which has a Mailbox with this rank.

    Messages of all peers arrive in one queue, in the order they came in.

    Args:
        limit: messages taken in and not read at most; 0: as many as come.
        timeout_seconds: how long a peer may take to take a message in.
    """

    def __init__(
        self, group: dist.ProcessGroup, peers: Sequence[int], *, limit: int = 0, timeout_seconds: float = 600.0
    ) -> None:
        self._group, self.peers, self._timeout = group, tuple(peers), timeout_seconds
        self._inbox: queue.Queue[tuple[int, Any]] = queue.Queue(maxsize=limit)
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), name=f"mailbox-{peer}", daemon=True) for peer in peers
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, message: Any, *, timeout: float | None = None) -> None:
        """Raises PeerGoneError, also after ``timeout`` seconds (by default the mailbox's)."""
        self._send(peer, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), timeout or self._timeout)

    def receive(self, timeout: float) -> tuple[int, Any] | None:
        """(peer, message); None when none came within ``timeout`` seconds.

        Raises:
            PeerGoneError: a peer is gone.
        """
        try:
            peer, message = self._inbox.get(timeout=timeout) if timeout > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if isinstance(message, PeerGoneError):
            raise message
        return peer, message

    def close(self, timeout: float = 5.0) -> None:
        """Tell the peers and join the threads; peers that are gone are not waited for."""
        for peer in self.peers:
            try:
                self._send(peer, _GOODBYE, timeout)
            except PeerGoneError:
                pass
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _send(self, peer: int, payload: bytes, timeout: float) -> None:
        parts = [torch.tensor([len(payload)])]
        if payload:
            parts.append(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()))
        begin = time.monotonic()
        try:
            for part in parts:
                work = dist.isend(part, group=self._group, group_dst=peer)
                assert work is not None
                work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            stands_still = time.monotonic() - begin >= timeout
            what = f"has taken no message for {timeout:g} s" if stands_still else f"is gone: {_first_line(error)}"
            raise PeerGoneError(f"rank {peer} of the job {what}") from error

    def _listen(self, peer: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(size, group=self._group, group_src=peer)
                if not int(size):
                    return
                payload = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(payload, group=self._group, group_src=peer)
                self._inbox.put((peer, pickle.loads(payload.numpy().tobytes())))
        except RuntimeError as error:
            self._inbox.put((peer, PeerGoneError(f"rank {peer} of the job is gone: {_first_line(error)}")))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
