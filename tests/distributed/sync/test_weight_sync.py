"""WeightSync over two ranks: nobody enters the transfer unless everybody is ready, and nobody serves it alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.distributed.errors import PeerError, PeerLostError
from hybridengine.distributed.links import PeerLinks
from hybridengine.distributed.world import World
from hybridengine.memory.residency import ROLLOUT, SYNC
from hybridengine.sync.transfer.base import SyncReport
from hybridengine.sync.weight_sync import WeightSync
from tests.distributed.ranks import run_casualties, run_ranks
from tests.unit.sync.test_sharding import Case


class Transfer:
    """One all-reduce, which hangs unless all ranks are in it. ``note``: called with "transfer" before."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.peers = PeerLinks.connect(group=None)

    def run(self, version: int) -> SyncReport:
        self.note("transfer")
        dist.all_reduce(torch.zeros(1))
        return SyncReport(method="none", version=version)


def bracket(note: Callable[[str], None]) -> WeightSync:
    """A sync whose parts do nothing but call ``note`` with their names."""
    transfer: Any = Transfer(note)
    return WeightSync(transfer, begin=lambda: note("begin"), finish=lambda version: note(f"finish {version}"))


def fails_on_rank_1(world: World, step: str) -> tuple[list[str], str]:
    """Events of this rank, and what it was told; then the same sync goes through."""
    log: list[str] = []
    broken = True

    def note(name: str) -> None:
        log.append(name)
        if broken and world.rank == 1 and name == step:
            raise OSError("the engine of rank 1 is out of order")

    sync = bracket(note)
    with pytest.raises(OSError if world.rank == 1 else PeerError) as caught:
        sync.run(4)
    events = log.copy()
    assert sync.count == 0
    broken = False
    sync.run(4)
    assert log[len(events) :] == ["begin", "transfer", "finish 4"] and sync.count == 1
    return events, str(caught.value)


@pytest.mark.parametrize(
    ("step", "events"),
    [("begin", ["begin"]), ("finish 4", ["begin", "transfer", "finish 4"])],
    ids=["begin", "finish"],
)
def test_a_rank_that_fails_is_known_to_all_before_the_next_part(step: str, events: list[str]) -> None:
    """A failing begin is agreed on before the transfer's first collective, which would wait for rank 1 for ever."""
    (first, told), (second, own) = run_ranks(2, fails_on_rank_1, step, timeout=60)
    assert first == second == events
    what = "beginning" if step == "begin" else "finishing"
    assert told.startswith(f"{what} the weight sync to policy version 4: rank 1 failed (1 of 2 ranks): OSError:")
    assert own == "the engine of rank 1 is out of order"


def no_room_on_rank_1(world: World, moment: str) -> tuple[list[str], str]:
    """What this rank did of a sync, and what it was told."""
    case, full = Case(), {"sync": SYNC, "rollout": ROLLOUT}[moment]
    residency: Any = case.residency
    enter = residency.enter

    def enter_unless_full(phase: Any) -> None:
        if world.rank == 1 and phase == full:
            raise torch.OutOfMemoryError("the device of rank 1 is full")
        enter(phase)

    residency.enter = enter_unless_full
    with pytest.raises(torch.OutOfMemoryError if world.rank == 1 else PeerError) as caught:
        case.sharding.enter_rollout_mode()
    return [entry for entry in case.log if entry in ("begin", "transfer", "finish 0")], str(caught.value)


@pytest.mark.parametrize(
    ("moment", "events", "action"),
    [("sync", [], "a weight sync"), ("rollout", ["begin", "transfer", "finish 0"], "a rollout")],
    ids=["sync", "rollout"],
)
def test_a_rank_without_room_is_known_to_all_before_the_next_part(moment: str, events: list[str], action: str) -> None:
    """No rank begins a sync that rank 1 has no room for, nor plans a KV cache that rank 1 does not have."""
    (first, told), (second, own) = run_ranks(2, no_room_on_rank_1, moment, timeout=20)
    assert first == second == events
    assert told.startswith(f"making room for {action}: rank 1 failed (1 of 2 ranks): OutOfMemoryError:")
    assert own == "the device of rank 1 is full"


def dies(world: World) -> str:
    """Rank 1 is killed in its own part of the bracket; the others wait for it in a collective by then."""

    def note(name: str) -> None:
        if world.rank == 1 and name == "begin":
            os.kill(os.getpid(), signal.SIGKILL)

    sync = bracket(note)
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        sync.run(4)
    assert time.monotonic() - begin < 10
    return str(caught.value)


def test_survivors_name_the_rank_that_died(tmp_path: Path) -> None:
    """Before a transfer's first collective; for a death in the middle of one see transfer/test_lost.py."""
    (_, told), (code, _), (_, other) = run_casualties(3, dies, directory=tmp_path)
    assert code == -signal.SIGKILL
    for message in (told, other):  # a survivor that has reported it ends too, which the other one may see
        assert message.startswith("weight sync to policy version 4: rank 1 died: ") or "have ended: " in message
