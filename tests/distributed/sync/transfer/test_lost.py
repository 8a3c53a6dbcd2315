"""A rank is killed in the middle of a weight sync: all others say which sync it was, and which rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybridengine.distributed.errors import PeerLostError
from hybridengine.distributed.world import World
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.memory.tracker import MemoryTracker
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.sharding import ShardingManager
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.tracing import PhaseTimer
from tests.distributed.layouts import Holder, full_value, layout, shard, tensor_parallel
from tests.distributed.ranks import run_casualties
from tests.distributed.sync.transfer.test_failures import kill_in_run, take_steps_in_python
from tests.distributed.sync.transfer.test_transfer import Tiny

VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trainer(Holder):
    """Gathers and exports as a real engine does: with collectives in it. The victim dies in the second version's."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, full) in enumerate(super().full_parameters()):
            if (self.rank, self.version, i) == (VICTIM, 2, 3):
                die()
            dist.broadcast(full, 0)
            yield name, full

    def export(self, path: Path) -> None:
        if (self.rank, self.version) == (VICTIM, 2):
            die()
        if self.rank == 0:
            path.mkdir()
            save_file(
                {name: full_value(name, self.version, "float32") for name in self.shapes}, path / "model.safetensors"
            )
        dist.barrier()


def dies_in_a_sync(world: World, method: str, number: int, switch: bool) -> str:
    """The victim is killed in its ``number``-th box copy of the second sync, or in what Trainer does.

    ``switch``: syncs go through the mode switch.
    """
    a, b = layout(shard(0), world.size, "float32"), layout(tensor_parallel(1, 0), world.size, "bfloat16")
    train, rollout = Trainer(a, world.rank, fill=0), Holder(b, world.rank)
    Tiny.size = 1536
    transfer = make_transfer(method, train, rollout, build_plan(a, b), Tiny(world=world, timeout_seconds=20))
    sync: Any = WeightSync(transfer).run
    if switch:
        sharding = mode_switch(world, train, transfer)
        sync = lambda version: sharding.enter_rollout_mode()  # noqa: E731
    for version in (1, 2):
        train.write(version)
        train.version = version
        if version == 1:
            sync(version)
            assert rollout.holds(version)
    if number:
        take_steps_in_python()
        kill_in_run(world, rank=VICTIM, number=number)
    begin = time.perf_counter()
    with pytest.raises(PeerLostError) as caught:
        sync(2)
    assert time.perf_counter() - begin < 10
    transfer.close()
    return str(caught.value)


def mode_switch(world: World, train: Holder, transfer: Any) -> ShardingManager:
    engine = SimpleNamespace(
        weights_version=-1, kv_blocks=None, begin_update=lambda: None, finish_update=lambda version: None
    )
    phases = Phases(PhaseTimer(), MemoryTracker(world.device, lambda: ({}, {})), Residency({}))
    return ShardingManager(train, engine, transfer, phases=phases, world=world, log_rank0=print)  # type: ignore[arg-type]


SCENES = [
    pytest.param("collective", 4, id="collective"),
    pytest.param("broadcast", 4, id="broadcast"),
    pytest.param("delta", 2, id="delta"),
    pytest.param("gather", 0, id="gather"),
    pytest.param("gather", 1, id="gather-in-the-proof"),
    pytest.param("checkpoint", 0, id="checkpoint"),
]


@pytest.mark.parametrize(("method", "number"), SCENES)
def test_peer_killed_in_a_collective(tmp_path: Path, method: str, number: int) -> None:
    found = run_casualties(3, dies_in_a_sync, method, number, False, directory=tmp_path)
    assert found[VICTIM][0] == -signal.SIGKILL
    for rank in (0, 2):  # a survivor that has reported it ends too, which the other one may see
        assert re.match(
            r"weight sync to policy version 2: (rank 1 died|ranks \[(0, 1|1, 2)\] have ended): ", found[rank][1]
        )


@pytest.mark.parametrize(("method", "number"), [("pull", 4), ("collective", 4)])
def test_the_mode_switch_reports_what_the_transfer_says(tmp_path: Path, method: str, number: int) -> None:
    """Though it can't have the ranks agree any more."""
    found = run_casualties(3, dies_in_a_sync, method, number, True, directory=tmp_path)
    assert [code for code, _ in found] == [0, -signal.SIGKILL, 0]
    assert all("rank" in found[rank][1] for rank in (0, 2))
