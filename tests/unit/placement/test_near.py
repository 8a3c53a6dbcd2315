"""Nearly out of memory: one warning per phase, with what holds it and what would help."""

from __future__ import annotations

import logging

import pytest
import torch

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.memory.tracker import GIB, MemoryTracker, PhaseMemory
from hybridengine.placement import near
from hybridengine.placement.near import NearLimit


@pytest.fixture(autouse=True)
def available(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    free = [1.0]
    monkeypatch.setattr(near, "available_host_memory", lambda: int(free[0] * GIB))
    return free


def run_of(name: str, *, used: float, peak: float) -> PhaseMemory:
    return PhaseMemory(
        name, used=int(used * GIB), peak=int(peak * GIB), owners={"trainer_params": 3 * GIB}, asleep={"optimizer": GIB}
    )


def test_a_peak_near_the_limit_is_said_once_per_phase(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks with 0.3 GiB above what they hold now, each, and 1 GiB free: 0.4 GiB of 21 were left."""
    check = NearLimit(Config(), World(size=2, local_size=2))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check(run_of("forward_backward", used=10, peak=10.3))
        check(run_of("rollout", used=10, peak=10))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("nearly out of memory in phase 'forward_backward': 0.40 GiB of 21.00 GiB were left")
    for text in ("trainer_params 3.00 GiB", "elsewhere: optimizer 1.00 GiB", "train.activation_checkpointing=true"):
        assert text in message


@pytest.mark.parametrize(("free", "warns"), [(0.05, True), (3.0, False)])
def test_how_near_depends_on_what_the_job_can_have(
    available: list[float], caplog: pytest.LogCaptureFixture, free: float, warns: bool
) -> None:
    available[0] = free
    NearLimit(Config(), World())(run_of("sync", used=10, peak=10))
    assert bool(caplog.records) == warns


def test_a_phase_is_looked_at_again_after_a_while(
    available: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, now = NearLimit(Config(), World()), [100.0]
    monkeypatch.setattr(near.time, "monotonic", lambda: now[0])
    for available[0], now[0] in ((3.0, 100.0), (0.0, 100.9), (3.0, 101.1), (0.0, 102.2)):
        assert not caplog.records
        check(run_of("sync", used=10, peak=10))
    assert len(caplog.records) == 1


def test_one_rank_of_a_machine_speaks(available: list[float], caplog: pytest.LogCaptureFixture) -> None:
    available[0] = 0.0
    NearLimit(Config(), World(rank=1, local_rank=1, size=2, local_size=2))(run_of("sync", used=10, peak=10))
    assert not caplog.records


def test_the_tracker_tells_of_every_phase_that_ends_well() -> None:
    tracker, told = MemoryTracker(torch.device("cpu")), []
    tracker.watch = lambda run: told.append((run.name, run.peak >= run.used > 0))
    with tracker.phase("train"), tracker.phase("move"):
        pass
    with pytest.raises(ValueError, match="injected"), tracker.phase("sync"):
        raise ValueError("injected")
    assert told == [("train/move", True), ("train", True)]
