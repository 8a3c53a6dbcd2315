"""ShardingManager on recording engines: the order of a mode switch, what a failure leaves, what it records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import (
    DEEP_SLEEP,
    GRADS,
    KV_CACHE,
    OPTIMIZE,
    OPTIMIZER,
    ROLLOUT_WEIGHTS,
    TRAINER_PARAMS,
    IllegalMoveError,
    Residency,
    State,
)
from hybridengine.memory.tracker import MemoryTracker
from hybridengine.sync.sharding import ShardingManager
from hybridengine.sync.transfer.base import SyncReport, WeightSyncError
from hybridengine.tracing import PhaseTimer
from tests.unit.memory.fake_mover import fakes

OWNERS = (TRAINER_PARAMS, GRADS, OPTIMIZER, ROLLOUT_WEIGHTS, KV_CACHE)


class Engine:
    """Records its update bracket; names versions as rollout engines do."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.weights_version, self.kv_blocks = log, -1, None

    def begin_update(self) -> None:
        self.log.append("begin")

    def finish_update(self, version: int) -> None:
        self.log.append(f"finish {version}")
        self.weights_version = version


class Transfer:
    def __init__(self, log: list[str]) -> None:
        self.log, self.fails = log, False

    def run(self, version: int) -> SyncReport:
        self.log.append("transfer")
        if self.fails:
            raise WeightSyncError("injected")
        return SyncReport(
            method="pull", version=version, bytes_received=1000 + version, bytes_local=500, bytes_aliased=20,
            seconds=2.0, wait_seconds=0.5, fingerprint_seconds=0.25,
        )  # fmt: skip


class Case:
    """A mode switch in the middle of training: everything that training needs is on the device."""

    def __init__(self, *, aliased: bool = False, rest: dict[str, State] = DEEP_SLEEP) -> None:
        movers, self.log = fakes(OWNERS)
        self.residency = Residency(
            movers, aliased=aliased, rest=rest, after_leaving=lambda: self.log.append("empty cache")
        )
        self.residency.enter(OPTIMIZE)
        self.log.clear()
        self.train: Any = SimpleNamespace(version=0)
        self.engine, self.transfer = Engine(self.log), Transfer(self.log)
        phases = Phases(PhaseTimer(), MemoryTracker(torch.device("cpu"), lambda: ({}, {})), self.residency)
        parts: Any = (self.train, self.engine, self.transfer)
        self.sharding = ShardingManager(*parts, phases=phases, world=World(), log_rank0=self.log.append)


def test_the_switch_is_in_the_order_that_keeps_the_peak_low() -> None:
    case = Case()
    case.sharding.enter_rollout_mode()
    assert case.log == [
        "optimizer host",
        "grads dropped",
        "empty cache",
        "rollout_weights device",
        "begin",
        "transfer",
        "finish 0",
        "trainer_params host",
        "empty cache",
        "kv_cache device",
    ]


def test_aliased_training_weights_stay_and_may_not_leave() -> None:
    case = Case(aliased=True)
    case.sharding.enter_rollout_mode()
    assert "trainer_params host" not in case.log
    with pytest.raises(IllegalMoveError, match="trainer_params can't go from device to host: rollout_weights .device"):
        case.residency.move(TRAINER_PARAMS, State.HOST)


def test_owners_that_rest_on_the_device_stay() -> None:
    case = Case(rest=dict.fromkeys(OWNERS, State.DEVICE))
    case.sharding.enter_rollout_mode()
    assert case.log == ["begin", "transfer", "finish 0"]


def test_a_second_rollout_at_the_same_version_moves_nothing() -> None:
    case = Case()
    case.sharding.enter_rollout_mode()
    case.log.clear()
    case.sharding.enter_rollout_mode()
    assert case.log == []


def test_weights_that_were_dropped_are_synced_again_at_the_same_version() -> None:
    case = Case()
    case.sharding.enter_rollout_mode()
    case.residency.enter(OPTIMIZE)
    case.log.clear()
    case.sharding.enter_rollout_mode()
    assert case.log.index("rollout_weights device") < case.log.index("transfer") < case.log.index("kv_cache device")


def test_a_failed_sync_leaves_weights_that_nobody_can_generate_with() -> None:
    case = Case()
    case.transfer.fails = True
    with pytest.raises(WeightSyncError, match="injected"):
        case.sharding.enter_rollout_mode()
    assert "finish 0" not in case.log and case.residency.is_blank(ROLLOUT_WEIGHTS)
    with pytest.raises(WeightSyncError, match="injected"):
        case.sharding.enter_rollout_mode()
    case.transfer.fails = False
    case.sharding.enter_rollout_mode()
    assert case.residency.phase == "rollout" and case.engine.weights_version == 0


def test_weights_that_never_left_do_not_count_after_a_failed_sync() -> None:
    """Half of them may be new: memory that stays on the device keeps no promise either."""
    case = Case(rest=dict.fromkeys(OWNERS, State.DEVICE))
    case.sharding.enter_rollout_mode()
    assert not case.residency.is_blank(ROLLOUT_WEIGHTS)
    case.train.version, case.transfer.fails = 1, True
    with pytest.raises(WeightSyncError, match="injected"):
        case.sharding.enter_rollout_mode()
    assert case.residency.is_blank(ROLLOUT_WEIGHTS)


class Blocks:
    """A KV cache of 100 blocks of 1 GiB."""

    total, minimum, block_bytes, planned = 100, 10, 2**30, False

    def __init__(self) -> None:
        self.usable = 100

    def allow(self, count: int) -> None:
        self.usable, self.planned = count, True


def test_a_kv_cache_that_does_not_fit_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridengine.memory.kv_plan.plan", lambda blocks, world: blocks.allow(60))
    case = Case(rest={})
    case.engine.kv_blocks = Blocks()  # type: ignore[assignment]
    for version in range(2):
        case.train.version = version
        case.sharding.enter_rollout_mode()
    assert case.sharding.metrics()["memory/kv_cache_usable"] == 0.6
    (line,) = [entry for entry in case.log if entry.startswith("memory: ")]
    assert line.startswith("memory: 60.00 of 100.00 GiB of KV cache per rank are usable in this rollout")


def test_the_last_sync_is_in_the_metrics() -> None:
    """Nothing before the first one; a version that is there already and a failed sync change nothing."""
    case = Case(rest={})
    sharding, train, transfer, engine = case.sharding, case.train, case.transfer, case.engine
    assert sharding.metrics() == {"sync/count": 0.0}
    sharding.enter_rollout_mode()
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
    sharding.enter_rollout_mode()
    assert sharding.metrics() == expected
    train.version, transfer.fails = 1, True
    with pytest.raises(WeightSyncError, match="injected"):
        sharding.enter_rollout_mode()
    assert sharding.metrics() == expected and engine.weights_version == 0
    transfer.fails = False
    sharding.enter_rollout_mode()
    assert sharding.metrics() == expected | {"sync/count": 2.0, "sync/bytes_received": 1001.0}
