"""Scenes of weight transfers between processes that share one GPU: played on a real one by tests/gpu, and where there
is none on threaded streams by tests/cuda."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridengine.distributed.errors import PeerError, PeerLostError
from hybridengine.distributed.world import World
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import (
    FingerprintMismatchError,
    LayoutChangedError,
    StaleGenerationError,
    TransferSettings,
    WeightSyncError,
)
from hybridengine.sync.transfer.device_pipeline import DeviceMoves
from hybridengine.sync.transfer.registry import make_transfer
from tests.cuda import streams
from tests.distributed.layouts import Holder, layout, only, shard, tensor_parallel
from tests.distributed.ranks import run_casualties
from tests.distributed.sync.transfer.test_failures import fails
from tests.distributed.sync.transfer.test_transfer import DTYPES, Tiny, are_cut, smallest_bucket

FAILURES = (WeightSyncError, PeerError, PeerLostError)


def on_gpu(world: World) -> World:
    """All ranks on the one GPU, or on what stands in for it; collectives stay on gloo and the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        return dataclasses.replace(world, device=device)
    from tests.cuda import standin

    standin.install(threaded=True)
    return world


def enqueue(work: Callable[[], None], *, busy: float) -> None:
    """``work`` on the current stream, which is busy for about so many seconds before it."""
    torch.cuda._sleep(int(busy * 1.5e9))
    if torch.cuda.is_available():
        work()
    else:
        streams.Stream.current.submit(work)


def make(world: World, method: str, source, target, *, held="float32", dtype="float32", tiny: int = 0, **kwargs):
    """``held`` and ``dtype``: of the trainer and of the engine."""
    options = {name: kwargs.pop(name) for name in ("verify", "weights_leave") if name in kwargs}
    a, b = layout(source, world.size, held), layout(target, world.size, dtype, **kwargs)
    train = Holder(a, world.rank, fill=0, device=world.device)
    rollout = Holder(b, world.rank, device=world.device)
    chosen = (Tiny if tiny else TransferSettings)(world=world, timeout_seconds=20, **options)
    Tiny.size = tiny
    return train, rollout, make_transfer(method, train, rollout, build_plan(a, b), chosen)


def advance(train: Holder, rollout: Holder, transfer, version: int):
    train.write(version)
    train.version = version
    report = transfer.run(version)
    assert rollout.holds(version), version
    return report


def matrix(world: World, method: str, small: bool) -> None:
    """Every layout and dtype; and with weights that leave the device, so that all of it is staged."""
    world = on_gpu(world)
    everything, tiny = tensor_parallel(1, 0), smallest_bucket(method, world.size) if small else 0
    for source in (shard(0), shard(1)):
        for target in (everything, tensor_parallel(2, 0), tensor_parallel(2, 1), only({0})):
            for held, served, transposed in DTYPES.values():
                for leave in (False, True) if method == "pull" else (False,):
                    train, rollout, transfer = make(
                        world, method, source, target, held=held, dtype=served, tiny=tiny, transposed=transposed,
                        weights_leave=leave,
                    )  # fmt: skip
                    if method == "pull" and target is everything and served != "float32":
                        assert are_cut(transfer, transfer._plan) == bool(tiny)
                    for version in (1, 2, 3):
                        report = advance(train, rollout, transfer, version)
                        if method == "pull":
                            assert report.bytes_received == report.bytes_minimum
                            assert report.extra_bytes or not leave or target is not everything
                        if leave:
                            train.tensors = {name: t.clone() for name, t in train.tensors.items()}
                    transfer.close()


def late_writer(world: World) -> None:
    """Rank 1's optimizer kernel is still running when the sync begins: its word holds readers back."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    for version in (2, 3):
        if world.rank == 1:
            enqueue(lambda version=version: train.write(version), busy=1.0)
        else:
            train.write(version)
        transfer.run(version)
        assert rollout.holds(version)


def missing_fence(world: World) -> None:
    """Without waiting for the word, old weights are read, and the fingerprint says so."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    DeviceMoves._wait = lambda *args: None  # type: ignore[method-assign]
    if world.rank == 1:
        values = {name: value.clone() for name, value in train.expected(2).items()}
        torch.cuda.synchronize()

        def write() -> None:
            for name, value in values.items():
                train.tensors[name].copy_(value)

        enqueue(write, busy=2.0)
    else:
        train.write(2)
    with pytest.raises(FingerprintMismatchError):
        transfer.run(2)


def flipped_bit(world: World) -> None:
    """Somebody writes into the weights while they are read."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    train.write(2)
    if world.rank == 1:
        own = transfer._moves._own
        run = own.run

        def late(step: int, sums: torch.Tensor | None) -> None:
            def flip() -> None:
                train.tensors["embed"].view(torch.int32).view(-1)[3] ^= 1 << 20

            enqueue(flip, busy=0.5)  # rank 0 has read by now; what this rank sums afterwards is something else
            run(step, sums)

        own.run = late
    with pytest.raises(FingerprintMismatchError, match="embed"):
        transfer.run(2)


def moved_rollout(world: World) -> None:
    """The engine's weights are elsewhere after each sleep."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(2, 0), dtype="bfloat16")
    for version in (1, 2, 3):
        advance(train, rollout, transfer, version)
        rollout.tensors = {name: torch.zeros_like(t) for name, t in rollout.tensors.items()}


def moved_trainer(world: World) -> None:
    """Exported weights may not move, and are refused by name when they have."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    train.tensors["proj"] = train.tensors["proj"].clone()
    with pytest.raises(LayoutChangedError, match="proj"):
        transfer.run(2)


def other_version(world: World) -> None:
    """Ranks that disagree about the version fail together, and what was enqueued does not spoil the next sync."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    message = fails(transfer, 2 + world.rank, StaleGenerationError, *FAILURES)
    assert "policy version" in message or "gave up" in message
    for version in (5, 6):
        advance(train, rollout, transfer, version)


def never_begins(world: World) -> None:
    """Rank 1 fails before it has enqueued anything: rank 0's streams, which wait for it, are let run out."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    aim = transfer._aim
    if world.rank == 1:

        def fail() -> None:
            raise OSError("the disk of rank 1 is on fire")

        transfer._aim = fail
    message = fails(transfer, 2, OSError, *FAILURES)
    assert "on fire" in message or "rank" in message
    transfer._aim = aim
    for version in (3, 4):
        advance(train, rollout, transfer, version)


def raises_midway(world: World) -> None:
    """A launch of rank 1 fails with half of its steps enqueued."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    enqueue_step, steps = transfer._moves._enqueue, 0

    def failing(*args) -> None:
        nonlocal steps
        steps += 1
        if world.rank == 1 and steps == 4:
            raise RuntimeError("the box copy could not be launched: CUDA error 700")
        enqueue_step(*args)

    transfer._moves._enqueue = failing
    message = fails(transfer, 2, RuntimeError, *FAILURES)
    assert "CUDA error 700" in message or "rank" in message
    transfer._moves._enqueue = enqueue_step
    for version in (3, 4):
        advance(train, rollout, transfer, version)


def one_queue(world: World) -> None:
    """A device that serves a process's streams one after the other, in the order of enqueuing: nobody waits in a
    circle. (On a real GPU this is CUDA_DEVICE_MAX_CONNECTIONS=1.)"""
    streams.Stream.one_queue = True
    world = on_gpu(world)
    for leave in (False, True):
        for target in (tensor_parallel(1, 0), tensor_parallel(2, 1)):
            train, rollout, transfer = make(
                world, "pull", shard(0), target, dtype="bfloat16", tiny=128, weights_leave=leave
            )
            for version in (1, 2):
                advance(train, rollout, transfer, version)


SCENES = [
    late_writer, missing_fence, flipped_bit, moved_rollout, moved_trainer, other_version, never_begins, raises_midway,
    one_queue,
]  # fmt: skip


def dies_midway(world: World) -> str:
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    if world.rank == 1:
        enqueue_step, steps = transfer._moves._enqueue, 0

        def dying(*args) -> None:
            nonlocal steps
            steps += 1
            if steps == 4:
                signal.raise_signal(signal.SIGKILL)
            enqueue_step(*args)

        transfer._moves._enqueue = dying
    train.write(2)
    return fails(transfer, 2, PeerLostError)


def check_casualty(directory: Path) -> None:
    (_, message), (code, _) = run_casualties(2, dies_midway, directory=directory, timeout=100)
    assert code == -signal.SIGKILL
    assert "rank 1 died" in message


def stopped(world: World) -> str:
    """Rank 1 is stopped, not dead: rank 0 gives up by its deadline and names it."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    if world.rank == 1:
        time.sleep(6)
        return ""
    transfer._waiter._timeout = 1.0
    train.write(2)
    begin = time.monotonic()
    message = fails(transfer, 2, PeerLostError)
    assert time.monotonic() - begin < 4
    return message


def alone(world: World, method: str) -> None:
    """One rank: nothing is exported, and both sides may move between syncs, as offloading makes them."""
    world = on_gpu(world)
    for dtype in ("float32", "bfloat16"):
        train, rollout, transfer = make(world, method, shard(0), tensor_parallel(1, 0), dtype=dtype)
        for version in (1, 2, 3):
            advance(train, rollout, transfer, version)
            train.tensors = {name: t.clone() for name, t in train.tensors.items()}
            rollout.tensors = {name: torch.zeros_like(t) for name, t in rollout.tensors.items()}
