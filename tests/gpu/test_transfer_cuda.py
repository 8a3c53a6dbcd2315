"""Weight transfers between processes that share one GPU: CUDA IPC, interprocess events, staged casts."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import pytest
import torch

from hybridengine.distributed.errors import PeerLostError
from hybridengine.distributed.world import World
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import FingerprintMismatchError, LayoutChangedError, TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.layouts import Holder, layout, only, shard, tensor_parallel
from tests.distributed.ranks import run_casualties, run_ranks
from tests.distributed.sync.transfer.test_failures import fails, kill_in_run
from tests.distributed.sync.transfer.test_transfer import DTYPES, Tiny, are_cut, smallest_bucket

DEVICE = torch.device("cuda", 0)


def on_gpu(world: World) -> World:
    """All ranks on the one GPU; collectives stay on gloo and the CPU."""
    torch.cuda.set_device(DEVICE)
    return dataclasses.replace(world, device=DEVICE)


def make(world: World, method: str, source, target, *, held="float32", dtype="float32", tiny: int = 0, **kwargs):
    """``held`` and ``dtype``: of the trainer and of the engine."""
    a, b = layout(source, world.size, held), layout(target, world.size, dtype, **kwargs)
    train, rollout = Holder(a, world.rank, fill=0, device=DEVICE), Holder(b, world.rank, device=DEVICE)
    chosen = (Tiny if tiny else TransferSettings)(world=world, timeout_seconds=20)
    Tiny.size = tiny
    return train, rollout, make_transfer(method, train, rollout, build_plan(a, b), chosen)


def advance(train: Holder, rollout: Holder, transfer, version: int):
    train.write(version)
    train.version = version
    report = transfer.run(version)
    assert rollout.holds(version), version
    return report


def matrix(world: World, method: str, small: bool) -> None:
    world = on_gpu(world)
    everything, tiny = tensor_parallel(1, 0), smallest_bucket(method, world.size) if small else 0
    for source in (shard(0), shard(1)):
        for target in (everything, tensor_parallel(2, 0), tensor_parallel(2, 1), only({0})):
            for held, served, transposed in DTYPES.values():
                train, rollout, transfer = make(
                    world, method, source, target, held=held, dtype=served, tiny=tiny, transposed=transposed
                )
                if method == "pull" and target is everything and served != "float32":
                    assert are_cut(transfer, transfer._plan) == bool(tiny)
                for version in (1, 2, 3):
                    report = advance(train, rollout, transfer, version)
                    if method == "pull":
                        assert report.bytes_received == report.bytes_minimum
                transfer.close()


@pytest.mark.parametrize("small", [False, True], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize(("size", "method"), [(2, "pull"), (3, "pull"), (2, "gather")])
def test_every_layout_and_dtype(size: int, method: str, small: bool) -> None:
    run_ranks(size, matrix, method, small, timeout=240)


def late_writer(world: World) -> None:
    """Rank 1's optimizer kernel is still running when the weights are published: the event holds readers back."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    for version in (2, 3):
        if world.rank == 1:
            torch.cuda._sleep(2_000_000_000)
        train.write(version)
        transfer.run(version)
        assert rollout.holds(version)


def missing_fence(world: World) -> None:
    """Without the event, old weights are read, and the fingerprint says so."""
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    for peer in transfer._mapped.values():
        peer[0].await_ready = lambda: None
    if world.rank == 1:
        values = {name: value.clone() for name, value in train.expected(2).items()}
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)
        for name, value in values.items():
            train.tensors[name].copy_(value)
    else:
        train.write(2)
    with pytest.raises(FingerprintMismatchError):
        transfer.run(2)


def flipped_bit(world: World) -> None:
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0))
    advance(train, rollout, transfer, 1)
    train.write(2)
    if world.rank == 1:
        publish = transfer._regions[0].control.publish

        def torn(generation: int, version: int) -> None:
            publish(generation, version)
            time.sleep(0.5)  # rank 0 reads now; what this rank sums afterwards is something else
            train.tensors["embed"].view(torch.int32).view(-1)[3] ^= 1 << 20

        transfer._regions[0].control.publish = torn
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


@pytest.mark.parametrize(
    "scene", [late_writer, missing_fence, flipped_bit, moved_rollout, moved_trainer], ids=lambda f: f.__name__
)
def test_fences_and_damage(scene) -> None:
    run_ranks(2, scene, timeout=120)


def dies_midway(world: World) -> str:
    world = on_gpu(world)
    train, rollout, transfer = make(world, "pull", shard(0), tensor_parallel(1, 0), dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    kill_in_run(world, rank=1, number=4)
    train.write(2)
    return fails(transfer, 2, PeerLostError)


def test_peer_killed_in_midpull(tmp_path: Path) -> None:
    (_, message), (code, _) = run_casualties(2, dies_midway, directory=tmp_path, timeout=100)
    assert code == -signal.SIGKILL
    assert "rank 1 died" in message


def alone(world: World, method: str) -> None:
    """One rank: nothing is exported, and both sides may move between syncs, as offloading makes them."""
    world = on_gpu(world)
    for dtype in ("float32", "bfloat16"):
        train, rollout, transfer = make(world, method, shard(0), tensor_parallel(1, 0), dtype=dtype)
        for version in (1, 2, 3):
            advance(train, rollout, transfer, version)
            train.tensors = {name: t.clone() for name, t in train.tensors.items()}
            rollout.tensors = {name: torch.zeros_like(t) for name, t in rollout.tensors.items()}


@pytest.mark.parametrize("method", ["pull", "gather"])
def test_one_rank_whose_tensors_move(method: str) -> None:
    run_ranks(1, alone, method, timeout=120)
