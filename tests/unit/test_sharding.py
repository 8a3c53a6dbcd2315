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
from hybridengine.sync.sharding import ShardingManager
from hybridengine.sync.transfer.base import WeightSyncError, SyncReport
from hybridengine.tracing import PhaseTimer


class Engine:
    """Names versions as rollout engines do."""

    weights_version = -1

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None:
        self.weights_version = version


class Transfer:
    fails = False

    def sync(self, version: int) -> SyncReport:
        if self.fails:
            raise WeightSyncError("injected")
        return SyncReport(
            method="pull", version=version, bytes_received=1000 + version, bytes_local=500, bytes_aliased=20,
            seconds=2.0, wait_seconds=0.5, fingerprint_seconds=0.25,
        )  # fmt: skip


def test_the_last_sync_is_in_the_metrics() -> None:
    """Nothing before the first one; a version that is there already and a failed sync change nothing."""
    train, engine, transfer = SimpleNamespace(version=0), Engine(), Transfer()
    phases = Phases(PhaseTimer(), MemoryTracker(torch.device("cpu"), lambda: ({}, {})), Residency({}))
    parts: Any = (train, engine, transfer)
    sharding = ShardingManager(*parts, phases=phases, world=World(), say=print)
    assert sharding.metrics() == {"sync/count": 0.0}
    sharding.sync()
    expected = {
        "sync/count": 1.0,
        "sync/bytes_received": 1000.0,
        "sync/bytes_local": 500.0,
        "sync/bytes_aliased": 20.0,
        "sync/seconds": 2.0,
        "sync/wait_seconds": 0.5,
        "sync/fingerprint_seconds": 0.25,
    }
    assert sharding.metrics() == expected
    sharding.sync()
    assert sharding.metrics() == expected
    train.version, transfer.fails = 1, True
    with pytest.raises(WeightSyncError, match="injected"):
        sharding.sync()
    assert sharding.metrics() == expected and engine.weights_version == 0
    transfer.fails = False
    sharding.sync()
    assert sharding.metrics() == expected | {"sync/count": 2.0, "sync/bytes_received": 1001.0}
