"""Connections between the ranks of one node: they show which ranks are alive, and pass file descriptors.

The sockets are in Linux's abstract namespace under a random name that only the ranks of the job exchange:
nothing appears in the file system, nothing is left behind by a crash, and two jobs never meet. A stranger that finds
the name is turned away by its user and by the token that it does not know.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from hybridengine.distributed.errors import PeerLostError, agree

_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_TOKEN_BYTES = 16
#: Most descriptors that one rank hands to another.
_MAX_FDS = 16
#: How long a process whose connections have broken may take to be gone.
_ENDING_SECONDS = 1.0
#: A connection that does not say who it is within this is a stranger's.
_GREETING_SECONDS = 5.0


def node_identity() -> str:
    """Equal for processes that can share memory: same kernel boot, same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def node_of(group: dist.ProcessGroup | None) -> list[int]:
    """Collective: which node each rank of ``group`` is on, numbered in the order of their first ranks."""
    identities: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(identities, node_identity(), group=group)
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    return [numbers[identity] for identity in identities]


class PeerLinks:
    """One connection to each other rank of ``group`` on this node, kept open: it closes when the peer's process ends.

    Attributes:
        fds: descriptors that each peer handed over; the receiver closes them.
    """

    def __init__(
        self, sockets: dict[int, socket.socket], accepted: list[socket.socket], fds: dict[int, list[int]]
    ) -> None:
        self._sockets, self._accepted, self.fds = sockets, accepted, fds

    @classmethod
    def connect(
        cls, fds: Sequence[int] = (), *, group: dist.ProcessGroup | None, timeout_seconds: float = 600.0
    ) -> PeerLinks:
        """Collective over ``group``: hand ``fds`` to every other rank of this node and receive theirs.

        Raises:
            PeerLostError or OSError on every rank when a rank could not be reached.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            with agree("opening a socket for the node's ranks", group):
                name = f"\0hybridengine-{secrets.token_hex(16)}"
                listener.bind(name)
                listener.listen(2 * size)
            addresses: list[tuple[str, str, bytes]] = [("", "", b"")] * size
            dist.all_gather_object(addresses, (node_identity(), name, token), group=group)
            near = [peer for peer in range(size) if addresses[peer][0] == addresses[rank][0] and peer != rank]
            with agree("connecting the node's ranks", group):
                incoming = _Listener(listener, token, len(near), timeout_seconds)
                sockets = {peer: _connect(*addresses[peer][1:], timeout_seconds) for peer in near}
                accepted = incoming.accept_all()
                for connection in accepted:
                    socket.send_fds(connection, [bytes([len(fds)])], list(fds))
                received = {peer: _receive_fds(link, peer) for peer, link in sockets.items()}
            return cls(sockets, accepted, received)
        finally:
            listener.close()

    def alive(self, rank: int) -> bool:
        """Whether the rank's process still exists (its end of the connection closes when it ends)."""
        link = self._sockets.get(rank)
        if link is None:
            return True
        try:
            return link.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def gone(self) -> list[int]:
        """Ranks of this node whose process has ended. Waits briefly for the first, since a collective's connection to a
        dying process breaks earlier than this one."""
        poll = select.poll()
        for link in self._sockets.values():
            poll.register(link, select.POLLIN | select.POLLHUP)
        if self._sockets:
            poll.poll(1000 * _ENDING_SECONDS)
        return sorted(rank for rank in self._sockets if not self.alive(rank))

    def close(self) -> None:
        """Safe to call twice."""
        for link in (*self._sockets.values(), *self._accepted):
            link.close()
        self._sockets, self._accepted = {}, []


class _Listener:
    """Accepts the connections of ``count`` peers on a thread of its own; closes those without the token."""

    def __init__(self, listener: socket.socket, token: bytes, count: int, timeout_seconds: float) -> None:
        self._listener, self._token, self._count = listener, token, count
        self._deadline = time.monotonic() + timeout_seconds
        self._timeout = timeout_seconds
        self._accepted: list[socket.socket] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="peer-links", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while len(self._accepted) < self._count:
                self._listener.settimeout(max(0.01, self._deadline - time.monotonic()))
                connection, _ = self._listener.accept()
                if self._is_peer(connection):
                    self._accepted.append(connection)
                else:
                    connection.close()
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            self._failure = error

    def _is_peer(self, connection: socket.socket) -> bool:
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.getuid():
            return False
        connection.settimeout(_GREETING_SECONDS)
        try:
            return connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == self._token
        except OSError:
            return False

    def accept_all(self) -> list[socket.socket]:
        """Wait for all peers. Raises PeerLostError after ``timeout_seconds``."""
        self._thread.join(max(0.01, self._deadline - time.monotonic()))
        if isinstance(self._failure, TimeoutError) or self._thread.is_alive():
            raise PeerLostError(f"some rank of this node did not connect within {self._timeout:g} s")
        if self._failure is not None:
            raise self._failure
        return self._accepted


def _connect(name: str, token: bytes, timeout_seconds: float) -> socket.socket:
    """Connect to a peer's listener."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(timeout_seconds)
    link.connect(name)
    link.sendall(token)
    return link


def _receive_fds(link: socket.socket, peer: int) -> list[int]:
    data, fds, _, _ = socket.recv_fds(link, 1, _MAX_FDS)
    if not data or len(fds) != data[0]:
        raise PeerLostError(f"rank {peer} closed the connection before it handed its memory over")
    link.setblocking(False)  # with a timeout set, even MSG_DONTWAIT waits
    return list(fds)
