"""Links between the ranks of one node: file descriptors handed over Unix sockets, and who is still alive.

The sockets are in Linux's abstract namespace under a random name that only the ranks of the job exchange:
nothing appears in the file system, nothing is left behind by a crash, and two jobs never meet.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
import threading

import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.sync.transfer.base import PeerLostError

_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid


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
    """One connection to each other rank of ``group``, kept open: it closes when the peer's process ends."""

    def __init__(self, sockets: dict[int, socket.socket], kept: list[socket.socket], fds: dict[int, list[int]]) -> None:
        self._sockets, self._kept = sockets, kept
        self.fds = fds  # what each peer handed over; the receiver closes them

    @classmethod
    def connect(cls, fds: list[int], *, group: dist.ProcessGroup | None, timeout_seconds: float) -> PeerLinks:
        """Collective: hand ``fds`` to every other rank and receive theirs.

        Raises:
            PeerLostError or OSError on every rank when a rank could not be reached.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with agree("opening a socket for the weight handoff", group):
                name = f"\0hybridengine-{secrets.token_hex(16)}"
                listener.bind(name)
                listener.listen(size)
                listener.settimeout(timeout_seconds)
            names: list[str] = [""] * size
            dist.all_gather_object(names, name, group=group)
            with agree("passing memory between ranks", group):
                return cls._exchange(listener, names, fds, rank, size, timeout_seconds)
        finally:
            listener.close()

    @classmethod
    def _exchange(
        cls, listener: socket.socket, names: list[str], fds: list[int], rank: int, size: int, timeout: float
    ) -> PeerLinks:
        kept: list[socket.socket] = []
        failures: list[Exception] = []

        def serve() -> None:
            try:
                for _ in range(size - 1):
                    connection, _ = listener.accept()
                    kept.append(connection)
                    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
                    if uid != os.getuid():
                        raise PermissionError(f"a process of user {uid} asked for the weights of user {os.getuid()}")
                    _send_fds(connection, fds)
            except Exception as error:  # noqa: BLE001  handed to the thread that waits
                failures.append(error)

        server = threading.Thread(target=serve, name="handoff-fds", daemon=True)
        server.start()
        sockets: dict[int, socket.socket] = {}
        received: dict[int, list[int]] = {}
        for step in range(1, size):
            peer = (rank + step) % size
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(timeout)
            sockets[peer] = link
            link.connect(names[peer])
            received[peer] = _receive_fds(link, peer)
            link.setblocking(False)  # with a timeout set, even MSG_DONTWAIT waits
        server.join(timeout)
        if failures:
            raise failures[0]
        if server.is_alive():
            raise PeerLostError(f"some rank did not fetch this rank's memory within {timeout:g} s")
        return cls(sockets, kept, received)

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
        """Ranks whose process has ended."""
        return [rank for rank in self._sockets if not self.alive(rank)]

    def close(self) -> None:
        for link in (*self._sockets.values(), *self._kept):
            link.close()


def _send_fds(link: socket.socket, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([bytes([len(fds)])], rights)


def _receive_fds(link: socket.socket, peer: int) -> list[int]:
    fds = array.array("i")
    data, ancillary, _, _ = link.recvmsg(1, socket.CMSG_SPACE(16 * fds.itemsize))
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data or len(fds) != data[0]:
        raise PeerLostError(f"rank {peer} closed the connection before it handed its memory over")
    return list(fds)
