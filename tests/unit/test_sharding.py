"""The mode switch on made-up engines: what it records of a sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.memory.tracker import MemoryTracker
from hybridengine.sync.manager import ShardingManager
from hybridengine.sync.transfer.base import HandoffError, SyncReport
from hybridengine.tracing import PhaseTimer


class Engine:
    """Names versions as rollout engines do."""

    weights_version = -1

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None:
        self.weights_version = version


class Handoff:
    fails = False

    def sync(self, version: int) -> SyncReport:
        if self.fails:
            raise HandoffError("injected")
        return SyncReport(
            method="pull", version=version, bytes_received=1000 + version, bytes_local=500, bytes_aliased=20,
            seconds=2.0, wait_seconds=0.5, fingerprint_seconds=0.25,
        )  # fmt: skip


def test_the_last_sync_is_in_the_metrics() -> None:
    """Nothing before the first one; a version that is there already and a failed sync change nothing."""
    train, engine, handoff = SimpleNamespace(version=0), Engine(), Handoff()
    phases = Phases(PhaseTimer(), MemoryTracker(torch.device("cpu"), lambda: ({}, {})), Residency({}))
    parts: Any = (train, engine, handoff)
    sharding = ShardingManager(*parts, phases=phases, world=World(), say=print)
    assert sharding.metrics() == {"handoff/syncs": 0.0}
    sharding.sync()
    expected = {
        "handoff/syncs": 1.0,
        "handoff/bytes_received": 1000.0,
        "handoff/bytes_local": 500.0,
        "handoff/bytes_aliased": 20.0,
        "handoff/seconds": 2.0,
        "handoff/wait_seconds": 0.5,
        "handoff/fingerprint_seconds": 0.25,
    }
    assert sharding.metrics() == expected
    sharding.sync()
    assert sharding.metrics() == expected
    train.version, handoff.fails = 1, True
    with pytest.raises(HandoffError, match="injected"):
        sharding.sync()
    assert sharding.metrics() == expected and engine.weights_version == 0
    handoff.fails = False
    sharding.sync()
    assert sharding.metrics() == expected | {"handoff/syncs": 2.0, "handoff/bytes_received": 1001.0}
