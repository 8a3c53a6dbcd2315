"""After the first sync, pull needs nothing but the memory that it has mapped."""

from __future__ import annotations

import inspect
import mmap
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from hybridengine.distributed.world import World
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.layouts import MIXED_SOURCE, MIXED_TARGET, Holder, layout, shard, tensor_parallel
from tests.distributed.ranks import run_ranks

#: Not the reads by which a rank that waits long asks whether its peer still lives: they carry nothing.
SOCKET_CALLS = ("accept", "bind", "connect", "listen", "recvmsg", "send", "sendall", "sendmsg", "sendto")
DTYPES = {
    "float32": ("float32", "float32"),
    "cast": ("float32", "bfloat16"),
    "mixed": (MIXED_SOURCE, MIXED_TARGET),
}


def forbidden(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} was called in a sync of the steady state")

    return refuse


def forbid_everything_but_memory() -> None:
    """Every function of torch.distributed that takes a group and communicates, sockets, new mappings and handles."""
    found = inspect.getmembers(dist.distributed_c10d, inspect.isfunction)
    calls = [
        name
        for name, function in found
        if {"group", "group_list"} & inspect.signature(function).parameters.keys()
        and not name.startswith(("_", "get_", "is_"))
    ] + ["batch_isend_irecv"]
    assert {"all_reduce", "all_gather_object", "all_to_all_single", "broadcast", "send", "recv", "barrier"} <= {*calls}
    for name in calls:
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, forbidden(name))
    for name in SOCKET_CALLS:
        setattr(socket.socket, name, forbidden(f"socket.{name}"))
    mmap.mmap = forbidden("mmap")  # type: ignore[misc, assignment]
    for name in ("memfd_create", "open", "pidfd_open", "pipe"):
        setattr(os, name, forbidden(f"os.{name}"))


def steady(world: World, case: str) -> None:
    held, served = DTYPES[case]
    a, b = layout(shard(0), world.size, held), layout(tensor_parallel(1, 0), world.size, served)
    train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
    transfer = make_transfer(
        "pull", train, rollout, build_plan(a, b), TransferSettings(world=world, timeout_seconds=20)
    )
    for version in (1, 2, 3):
        if version == 2:
            dist.barrier()
            forbid_everything_but_memory()
            with pytest.raises(AssertionError, match="all_reduce was called"):
                dist.all_reduce(None)
        train.write(version)
        transfer.run(version)
        assert rollout.holds(version)
        assert version == 1 or not rollout.holds(version - 1)


@pytest.mark.parametrize("case", DTYPES)
def test_syncs_after_the_first_call_nobody(case: str) -> None:
    run_ranks(3, steady, case, timeout=60)
