"""Frames between the trainer and a worker: four bytes of length, then the content.

Requests are pickled: the trainer is trusted, and rows of a data set hold all kinds of objects. Replies are JSON: a
worker has handled text that a model wrote, and what comes out of it must not be able to run code in the trainer.
"""

from __future__ import annotations

import socket
import struct
import time

#: A reply is a few numbers per sample, and perhaps a traceback.
LARGEST_REPLY = 1 << 22


class BrokenWorkerError(RuntimeError):
    """The other side is gone, or sent what is no reply."""


def send_frame(connection: socket.socket, content: bytes) -> None:
    """Raises BrokenWorkerError when the other side is gone."""
    try:
        connection.settimeout(None)
        connection.sendall(struct.pack(">I", len(content)) + content)
    except OSError as error:
        raise BrokenWorkerError(f"can't write to the other side: {error}") from None


class FrameReader:
    """Reads frames from ``connection``; what has come of the next one is kept between calls.

    Args:
        limit: bytes of the largest frame that is accepted; None: any.
    """

    def __init__(self, connection: socket.socket, *, limit: int | None = None) -> None:
        self._connection, self._limit = connection, limit
        self._buffer = bytearray()

    def read(self, deadline: float | None = None) -> bytes | None:
        """The next frame; None when it is not complete at ``deadline`` (time.monotonic(); None: no deadline).

        Raises:
            BrokenWorkerError: the other side is gone, or announces a frame beyond the limit.
        """
        while (length := self._length()) is None or len(self._buffer) < 4 + length:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            try:
                self._connection.settimeout(left)
                part = self._connection.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError as error:
                raise BrokenWorkerError(f"can't read from the other side: {error}") from None
            if not part:
                raise BrokenWorkerError("the process ended")
            self._buffer += part
        content = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return content

    def _length(self) -> int | None:
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack(">I", self._buffer[:4])
        if self._limit is not None and length > self._limit:
            raise BrokenWorkerError(f"a frame of {length} bytes")
        return int(length)
