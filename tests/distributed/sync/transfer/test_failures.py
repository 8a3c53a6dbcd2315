"""What goes wrong in a weight transfer ends on all ranks, soon, with a message that names it."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridengine.distributed import links
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
from hybridengine.sync.transfer.control import Waiter
from hybridengine.sync.transfer.host_pipeline import Lanes
from hybridengine.sync.transfer.pull import BOARD, RING
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.sync.transfer.tables import BoxTable
from tests.distributed.layouts import Holder, layout, shard, tensor_parallel
from tests.distributed.ranks import run_casualties, run_ranks
from tests.distributed.sync.transfer.test_transfer import Tiny

FAILURES = (WeightSyncError, PeerError, PeerLostError)


def make(
    world: World, method: str = "pull", *, dtype: str = "float32", tp: int = 1, group=None, tiny: int = 0, **kwargs
):
    """(train, rollout, transfer) with rows sharded over all ranks and TP replicas of ``tp``."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    a, b = layout(shard(0), size, "float32"), layout(tensor_parallel(tp, 0), size, dtype)
    train, rollout = Holder(a, rank, fill=0), Holder(b, rank)
    settings = (Tiny if tiny else TransferSettings)(world=world, group=group, timeout_seconds=20, **kwargs)
    Tiny.size = tiny
    return train, rollout, make_transfer(method, train, rollout, build_plan(a, b), settings)


def advance(train: Holder, rollout: Holder, transfer, version: int) -> None:
    train.write(version)
    train.version = version
    transfer.run(version)
    assert rollout.holds(version)


def fails(transfer, version: int, *kinds: type[Exception]) -> str:
    begin = time.perf_counter()
    with pytest.raises(kinds or FAILURES) as caught:
        transfer.run(version)
    assert time.perf_counter() - begin < 10
    return str(caught.value)


# -- fences ------------------------------------------------------------------------------------------------------------


def late_writer(world: World) -> None:
    """Rank 1's optimizer step ends half a second after rank 0 starts to pull."""
    train, rollout, transfer = make(world)
    advance(train, rollout, transfer, 1)
    if world.rank == 1:
        time.sleep(0.5)
    advance(train, rollout, transfer, 2)


def forgotten_wait(world: World) -> None:
    """The same without the fence: old weights are read, and the fingerprint says so on every rank."""
    train, rollout, transfer = make(world)
    advance(train, rollout, transfer, 1)
    Waiter.published = lambda *args, **kwargs: None
    if world.rank == 1:
        time.sleep(0.5)
    train.write(2)
    assert "different from what the trainer holds" in fails(transfer, 2, FingerprintMismatchError)


def early_writer(world: World) -> None:
    """Nobody returns before all have read: the trainer may write at once after sync."""
    train, rollout, transfer = make(world, verify=False)
    run = BoxTable.run

    def slow(self: BoxTable, sums, *part) -> None:
        time.sleep(0.3 * world.rank)
        run(self, sums, *part)

    BoxTable.run = slow
    advance(train, rollout, transfer, 1)
    train.write(9)
    assert rollout.holds(1)
    dist.barrier()
    assert rollout.holds(1)


def other_version(world: World) -> None:
    train, rollout, transfer = make(world)
    advance(train, rollout, transfer, 1)
    message = fails(transfer, 2 + world.rank, StaleGenerationError, PeerLostError, PeerError)
    assert "policy version" in message or "gave up" in message
    for version in (5, 6):
        advance(train, rollout, transfer, version)


@pytest.mark.parametrize("scene", [late_writer, forgotten_wait, early_writer, other_version], ids=lambda f: f.__name__)
def test_fences(scene) -> None:
    run_ranks(2, scene, timeout=60)


# -- a rank fails or dies ----------------------------------------------------------------------------------------------


def raises_midway(world: World, method: str) -> None:
    """Rank 1 raises while it fills its second chunk; everybody learns of it, and the next sync works."""
    take_steps_in_python()
    train, rollout, transfer = make(world, method, dtype="bfloat16", tiny=512)
    advance(train, rollout, transfer, 1)
    run, runs = BoxTable.run, 0

    def failing(self: BoxTable, sums, *part) -> None:
        nonlocal runs
        runs += 1
        if world.rank == 1 and runs == 4:
            raise OSError("the disk of rank 1 is on fire")
        run(self, sums, *part)

    BoxTable.run = failing
    message = fails(transfer, 2, OSError, *FAILURES)
    assert "on fire" in message or "rank" in message
    BoxTable.run = run
    advance(train, rollout, transfer, 3)


@pytest.mark.parametrize("size", [2, 3], ids=["2ranks", "3ranks"])
@pytest.mark.parametrize("method", ["pull", "collective"])
def test_sender_raises_in_midstream(method: str, size: int) -> None:
    run_ranks(size, raises_midway, method, timeout=60)


def take_steps_in_python() -> None:
    """From now on, lanes run table by table, which a test can count and interrupt."""
    Lanes._advance = partialmethod(Lanes._advance, by_library=False)


def dies_midway(world: World, *, by_library: bool) -> str:
    train, rollout, transfer = make(world, dtype="bfloat16", tiny=256)
    advance(train, rollout, transfer, 1)
    if by_library:
        stop_with_a_full_ring(world, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        take_steps_in_python()
        kill_in_run(world, rank=1, number=4)
    train.write(2)
    return fails(transfer, 2, PeerLostError)


def stop_with_a_full_ring(world: World, stop: Callable[[], None]) -> None:
    """Rank 0 comes late to the chunks: rank 1 has filled its ring and waits in the library when ``stop`` runs."""
    run = Lanes.run

    def late(self: Lanes, *args) -> None:
        if world.rank == 0:
            time.sleep(0.6)
        if world.rank == 1:
            threading.Timer(0.3, stop).start()
        run(self, *args)

    Lanes.run = late


def kill_in_run(world: World, *, rank: int, number: int) -> None:
    """From now on, ``rank`` is killed in its ``number``-th box copy."""
    run, runs = BoxTable.run, 0

    def dying(self: BoxTable, sums, *part) -> None:
        nonlocal runs
        runs += 1
        if world.rank == rank and runs == number:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self, sums, *part)

    BoxTable.run = dying


@pytest.mark.parametrize("by_library", [True, False], ids=["library", "python"])
def test_peer_killed_in_midpull(tmp_path: Path, by_library: bool) -> None:
    """Both survivors say which rank was lost, without waiting for a timeout."""
    dies = partial(dies_midway, by_library=by_library)
    (_, first), (code, _), (_, third) = run_casualties(3, dies, directory=tmp_path)
    assert code == -signal.SIGKILL
    for message in (first, third):
        assert "rank" in message and ("died" in message or "gave up" in message)
    assert "rank 1 died" in first or "rank 1 died" in third


# -- tensors that are not what was planned -----------------------------------------------------------------------------


def refused_at_setup(world: World, damage: str, words: list[str]) -> None:
    a, b = layout(shard(0), 2, "float32"), layout(tensor_parallel(1, 0), 2, "float32")
    train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
    if world.rank == 1:
        match damage:
            case "missing":
                del rollout.tensors["proj"]
            case "unknown":
                rollout.tensors["surprise"] = torch.zeros(3)
            case "dtype":
                rollout.tensors["proj"] = rollout.tensors["proj"].bfloat16()
            case "shape":
                rollout.tensors["proj"] = rollout.tensors["proj"][:-1].clone()
            case "source":
                del train.tensors["embed"]
    for method in ("pull", "collective"):
        settings = TransferSettings(world=world, timeout_seconds=20)
        with pytest.raises((ValueError, PeerError)) as caught:
            make_transfer(method, train, rollout, build_plan(a, b), settings)
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", ["do not exist", "proj"]),
        ("unknown", ["no part of the plan writes", "surprise"]),
        ("dtype", ["proj", "bfloat16", "float32"]),
        ("shape", ["proj", "[7, 12]"]),
        ("source", ["training tensors", "embed"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_tensors_that_do_not_fit_are_refused_by_name(damage: str, words: list[str]) -> None:
    run_ranks(2, refused_at_setup, damage, words, timeout=60)


def changed_since_setup(world: World) -> None:
    for method in ("pull", "collective"):
        for side in ("train", "rollout"):
            train, rollout, transfer = make(world, method)
            advance(train, rollout, transfer, 1)
            holder = train if side == "train" else rollout
            kept = holder.tensors["proj"]
            if world.rank == 1:
                # Peers have the exported memory mapped, so there another address is a change too.
                moved = side == "train" and method == "pull"
                holder.tensors["proj"] = kept.clone() if moved else kept.t().contiguous()
            message = fails(transfer, 2, LayoutChangedError, *FAILURES)
            assert "proj" in message if world.rank == 1 else "rank 1" in message, message
            holder.tensors["proj"] = kept
            advance(train, rollout, transfer, 3)
            transfer.close()


def moved_rollout(world: World) -> None:
    """Sleep frees the engine's weights and wake allocates others: same layout, other addresses, and that is fine."""
    train, rollout, transfer = make(world)
    for version in (1, 2, 3):
        advance(train, rollout, transfer, version)
        rollout.tensors = {name: torch.zeros_like(t) for name, t in rollout.tensors.items()}


@pytest.mark.parametrize("scene", [changed_since_setup, moved_rollout], ids=lambda f: f.__name__)
def test_changes_between_plan_and_run(scene) -> None:
    run_ranks(2, scene, timeout=60)


def forgotten_view(world: World) -> None:
    a = layout(shard(0), 2, "float32")
    train, rollout = Holder(a, world.rank, fill=0), Holder(a, world.rank)
    keeper = train.tensors["proj"].view(-1) if world.rank == 0 else None
    with pytest.raises((ValueError, PeerError), match="proj: 1 other tensor"):
        make_transfer("pull", train, rollout, build_plan(a, a), TransferSettings(world=world, timeout_seconds=20))
    del keeper


def test_a_view_that_would_part_from_the_shared_weights_is_refused() -> None:
    run_ranks(2, forgotten_view, timeout=60)


# -- damage on the way -------------------------------------------------------------------------------------------------


def damaged(world: World, when: str) -> None:
    """Rank 1 flips one bit: of what it wrote (first sync), or of its shard while others read it (later)."""
    train, rollout, transfer = make(world)
    if when == "later":
        advance(train, rollout, transfer, 1)
    read_target = transfer._verifier.read_target

    def flip(holder: Holder) -> None:
        if world.rank == 1:
            holder.tensors["embed"].view(torch.int32).view(-1)[3] ^= 1 << 20

    def damaged_target(live: dict[str, torch.Tensor]) -> None:
        flip(rollout)
        read_target(live)

    train.write(2)
    if when == "first":
        transfer._verifier.read_target = damaged_target
    elif world.rank == 1:
        publish = transfer._regions[BOARD].control.publish

        def torn(generation: int, version: int) -> None:
            publish(generation, version)
            time.sleep(0.5)  # rank 0 reads now
            flip(train)

        transfer._regions[BOARD].control.publish = torn
    assert "embed" in fails(transfer, 2, FingerprintMismatchError)


def damaged_ring(world: World) -> None:
    """One bit of a cast chunk flips before anybody reads it: the owner's sum was of what it cast."""
    train, rollout, transfer = make(world, dtype="bfloat16")
    advance(train, rollout, transfer, 1)
    assert transfer._staged.shared
    if world.rank == 1:
        take_steps_in_python()
        fill, ring = transfer._staged.lanes[0].table, transfer._regions[RING]
        run = fill.run

        def flip(sums, begin: int, end: int) -> None:
            run(sums, begin, end)
            if begin == 0:
                ring.bytes()[3] ^= 1

        fill.run = flip
    train.write(2)
    fails(transfer, 2, FingerprintMismatchError)


def test_a_flipped_bit_in_the_ring_fails_all_ranks() -> None:
    run_ranks(2, damaged_ring, timeout=60)


@pytest.mark.parametrize("when", ["first", "later"])
def test_one_flipped_bit_fails_all_ranks(when: str) -> None:
    run_ranks(2, damaged, when, timeout=60)


# -- several at once ---------------------------------------------------------------------------------------------------


def independent_pairs(world: World) -> None:
    """Two groups of one job, each its own transfer."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    train, rollout, transfer = make(world, dtype="bfloat16", tiny=512, group=groups[world.rank // 2])
    for version in (1, 2):
        advance(train, rollout, transfer, version + 10 * (world.rank // 2))


def plain(world: World, tag: str) -> None:
    token = secrets.token_hex
    links.secrets.token_hex = lambda nbytes: tag + token(nbytes)
    train, rollout, transfer = make(world)
    assert tag in Path("/proc/net/unix").read_text()
    for version in (1, 2, 3):
        advance(train, rollout, transfer, version)


def test_two_groups_in_one_job() -> None:
    run_ranks(4, independent_pairs, timeout=60)


def test_two_jobs_on_one_host_leave_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    failures: list[BaseException] = []

    tag = secrets.token_hex(4)

    def job() -> None:
        try:
            run_ranks(2, plain, tag, timeout=60)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    jobs = [threading.Thread(target=job) for _ in range(2)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert not failures, failures
    left = (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) - before
    assert not [name for name in left if "hybridengine" in name]
    assert tag not in Path("/proc/net/unix").read_text()
