"""A signal that one rank of two gets stops both after the same step."""

from __future__ import annotations

import os
import signal

from hybridengine.distributed.world import World
from hybridengine.interrupt import Interrupt
from tests.distributed.ranks import run_ranks


def _steps(world: World, signalled: int, at: int) -> tuple[int, int]:
    interrupt = Interrupt()
    step = 0
    while not interrupt.agreed() and step < 10:
        step += 1
        if world.rank == signalled and step == at:
            os.kill(os.getpid(), signal.SIGTERM)
    return step, interrupt.status


def test_both_stop_at_the_same_step() -> None:
    assert run_ranks(2, _steps, 1, 3) == [(3, 0), (3, 0)]
    assert run_ranks(2, _steps, 0, 7) == [(7, 0), (7, 0)]


def _status(world: World) -> tuple[bool, int]:
    interrupt = Interrupt()
    if world.rank == 1:
        interrupt.stop(4)
    return interrupt.agreed(), interrupt.status


def test_a_status_of_one_rank_is_everybody_s() -> None:
    assert run_ranks(2, _status) == [(True, 4), (True, 4)]
