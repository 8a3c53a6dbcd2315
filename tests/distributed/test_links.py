"""PeerLinks: descriptors from rank to rank, who is gone, and strangers at the door."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridengine.distributed import links
from hybridengine.distributed.errors import PeerError, PeerLostError
from hybridengine.distributed.links import PeerLinks
from hybridengine.distributed.world import World
from tests.distributed.ranks import run_casualties, run_ranks


def memory(text: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text)
    return fd


def exchange(world: World, group: dist.ProcessGroup | None = None) -> dict[int, list[bytes]]:
    """Every rank hands over two descriptors; what the others read through them."""
    connected = PeerLinks.connect(
        [memory(b"first of %d" % world.rank), memory(b"second of %d" % world.rank)], group=group, timeout_seconds=20
    )
    found = {peer: [os.pread(fd, 100, 0) for fd in fds] for peer, fds in connected.fds.items()}
    assert all(connected.alive(peer) for peer in range(world.size)) and connected.gone() == []
    dist.barrier(group)
    connected.close()
    connected.close()
    return found


def expected(rank: int, size: int) -> dict[int, list[bytes]]:
    return {peer: [b"first of %d" % peer, b"second of %d" % peer] for peer in range(size) if peer != rank}


@pytest.mark.parametrize("size", [1, 3])
def test_descriptors_reach_every_other_rank(size: int) -> None:
    assert run_ranks(size, exchange, timeout=60) == [expected(rank, size) for rank in range(size)]


# -- strangers ---------------------------------------------------------------------------------------------------------

#: What a process of the same user does that connects before the ranks do; None: it says nothing, and stays.
STRANGERS: dict[str, bytes | None] = {
    "silent": None,
    "garbage": b"\xff" * 16,
    "part-of-a-greeting": b"abc",
    "talkative": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "hangs-up": b"",
}


def strangers_first(world: World, kinds: list[str]) -> tuple[dict[int, list[bytes]], list[bool], float]:
    """Strangers connect to every rank's socket as soon as it listens.

    Returns:
        what is exchanged all the same; which strangers were turned away; seconds.
    """
    links._GREETING_SECONDS = 0.5
    listen, strangers = socket.socket.listen, list[socket.socket]()

    def with_strangers(listener: socket.socket, backlog: int) -> None:
        listen(listener, backlog)
        for kind in kinds:
            stranger, greeting = socket.socket(socket.AF_UNIX), STRANGERS[kind]
            stranger.connect(listener.getsockname())
            strangers.append(stranger)
            if greeting:
                stranger.sendall(greeting)
            elif greeting is not None:
                stranger.close()

    socket.socket.listen = with_strangers  # type: ignore[method-assign, assignment]
    begin = time.monotonic()
    found = exchange(world)
    return found, [turned_away(stranger) for stranger in strangers], time.monotonic() - begin


def turned_away(stranger: socket.socket) -> bool:
    """Whether nothing but the end comes from the other side."""
    if stranger.fileno() < 0:
        return True
    stranger.settimeout(5)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kinds", [["silent"], [*STRANGERS]], ids=["silent", "all-at-once"])
def test_strangers_are_turned_away_and_the_ranks_meet(kinds: list[str]) -> None:
    for rank, (found, turned, seconds) in enumerate(run_ranks(3, strangers_first, kinds, timeout=60)):
        assert found == expected(rank, 3)
        assert turned == [True] * len(kinds)
        assert seconds < 5


def another_user(world: World) -> dict[int, list[bytes]]:
    """A process of another user that even knows the token, which is the same everywhere here."""
    links.secrets = SimpleNamespace(token_bytes=lambda count: b"t" * count, token_hex=secrets.token_hex)  # type: ignore
    listen = socket.socket.listen

    def with_stranger(listener: socket.socket, backlog: int) -> None:
        listen(listener, backlog)
        ready, told = os.pipe()
        if os.fork() == 0:
            os.setuid(65534)
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(listener.getsockname())
            stranger.sendall(b"t" * 16)
            os.write(told, b".")
            os._exit(0 if turned_away(stranger) else 1)
        os.read(ready, 1)

    socket.socket.listen = with_stranger  # type: ignore[method-assign, assignment]
    found = exchange(world)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 0
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_turned_away_whatever_it_knows() -> None:
    assert run_ranks(2, another_user, timeout=60) == [expected(rank, 2) for rank in range(2)]


# -- ranks that do not come, and ranks that go -------------------------------------------------------------------------


def one_does_not_connect(world: World) -> str:
    if world.rank == 1:
        connect = socket.socket.connect

        def refused(link: socket.socket, address: Any) -> None:
            if link.family == socket.AF_UNIX:
                raise ConnectionRefusedError("no sockets left")
            connect(link, address)

        socket.socket.connect = refused  # type: ignore[method-assign, assignment]
    begin = time.monotonic()
    with pytest.raises((PeerLostError, PeerError, OSError)) as caught:
        PeerLinks.connect(group=None, timeout_seconds=1.0)
    assert time.monotonic() - begin < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "peer-links" and thread.is_alive()]
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_does_not_connect_fails_the_start_on_all() -> None:
    first, second = run_ranks(2, one_does_not_connect, timeout=60)
    assert first == "PeerLostError: some rank of this node did not connect within 1 s"
    assert second == "ConnectionRefusedError: no sockets left"


def one_ends(world: World) -> list[int]:
    connected, survivors = PeerLinks.connect(group=None), dist.new_group([0, 2])
    dist.barrier()
    if world.rank == 1:
        os._exit(3)
    found = connected.gone()
    assert not connected.alive(1) and connected.alive(0) and connected.alive(2)
    dist.barrier(survivors)
    return found


def test_a_rank_that_ended_is_known(tmp_path: Path) -> None:
    assert run_casualties(3, one_ends, directory=tmp_path) == [(0, [1]), (3, None), (0, [1])]
