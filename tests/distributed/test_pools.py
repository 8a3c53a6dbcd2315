"""Two pools in one job: groups across them, messages, claims, and weights from one pool to the other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.config.compose import build
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.errors import PeerError, PeerLostError, agree
from hybridengine.distributed.mailbox import Mailbox, PeerGoneError
from hybridengine.distributed.pools import Pools, split
from hybridengine.distributed.world import World, free_port
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.memory.tracker import MemoryTracker
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.claims import Claims
from hybridengine.schedule.messages import Failed, Ready, Stop, Update
from hybridengine.schedule.remote import RemoteRollouts
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import FingerprintMismatchError, NoEngine, SyncReport, TransferSettings
from hybridengine.sync.transfer.registry import make_transfer
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt
from tests.distributed.layouts import Cut, Holder, layout, shard, tensor_parallel
from tests.distributed.ranks import RankFailure, run_casualties, run_ranks


def split_job(world: World, rollout_ranks: int, port: int) -> Pools:
    """Two pools in the place of the job's own group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return split(world, rollout_ranks, timeout_seconds=30)


def groups(job: World, port: int) -> None:
    pools = split_job(job, 1, port)
    assert pools.role == ("train" if job.rank < 2 else "rollout")
    assert (pools.world.rank, pools.world.size) == ((job.rank, 2) if job.rank < 2 else (0, 1))
    assert (dist.get_rank(), dist.get_world_size()) == (pools.world.rank, pools.world.size)
    for group in (pools.messages, pools.weights):
        assert (dist.get_rank(group), dist.get_world_size(group)) == (job.rank, 3)
        found: list[int | None] = [None] * 3
        dist.all_gather_object(found, 10 * job.rank, group=group)
        assert found == [0, 10, 20]
        sent = torch.arange(3) + 100 * job.rank
        received = torch.zeros(3, dtype=torch.int64)
        dist.all_to_all_single(received, sent, group=group)
        assert received.tolist() == [job.rank, 100 + job.rank, 200 + job.rank]
        value = torch.tensor([job.rank])
        dist.broadcast(value, group=group, group_src=2)
        assert int(value) == 2
    inside = torch.ones(1)
    dist.all_reduce(inside)
    assert int(inside) == pools.world.size
    with pytest.raises((OSError, PeerError), match="rank 2|no disk"):
        with agree("a phase of the job", pools.weights):
            if job.rank == 2:
                raise OSError("no disk")


def messages(job: World, port: int) -> None:
    """In order, of any size, both ways at once; the sender waits for a reader that has stopped reading."""
    pools = split_job(job, 2, port)
    if pools.role == "train":
        box = Mailbox(pools.messages, [1, 2])
        for n in range(20):
            for peer in (1, 2):
                box.send(peer, {"n": n, "data": b"x" * (n * 10_000)})
        seen: dict[int, list[int]] = {1: [], 2: []}
        while sum(map(len, seen.values())) < 40:
            peer, message = box.receive(timeout=10.0) or (0, None)
            seen[peer].append(message)
        assert seen == {1: list(range(20)), 2: list(range(20))}
        assert box.receive(timeout=0.05) is None
    else:
        box = Mailbox(pools.messages, [0], limit=4)
        for n in range(20):
            box.send(0, n)
        for n in range(20):
            _, message = box.receive(timeout=10.0) or (0, None)
            assert message["n"] == n and len(message["data"]) == n * 10_000
    box.close()


def back_pressure(job: World, port: int) -> None:
    pools = split_job(job, 1, port)
    box = Mailbox(pools.messages, [1 - job.rank], limit=2)
    if job.rank == 0:
        begin = time.monotonic()
        for n in range(6):
            box.send(1, n)
        assert time.monotonic() - begin > 0.9
    else:
        time.sleep(1.0)
        assert [(box.receive(timeout=10.0) or (0, None))[1] for _ in range(6)] == list(range(6))
    box.close()


@pytest.mark.parametrize(
    ("scene", "size"), [(groups, 3), (messages, 3), (back_pressure, 2)], ids=["groups", "messages", "back-pressure"]
)
def test_pools(scene, size: int) -> None:
    run_ranks(size, scene, free_port(), timeout=60, group=False)


def peer_dies(job: World, port: int) -> str:
    pools = split_job(job, 1, port)
    if job.rank == 1:
        time.sleep(0.5)
        os._exit(9)
    box = Mailbox(pools.messages, [1])
    begin = time.monotonic()
    with pytest.raises(PeerGoneError, match="rank 1 of the job is gone"):
        while time.monotonic() - begin < 20:
            box.receive(timeout=1.0)
    raise AssertionError("noticed")


def test_a_peer_that_died_is_noticed() -> None:
    with pytest.raises(RankFailure, match="noticed|exited with code 9"):
        run_ranks(2, peer_dies, free_port(), timeout=60, group=False)


def remote_rollouts(job: World, pools: Pools, sync: WeightSync) -> RemoteRollouts:
    """Of two training ranks and one that generates."""
    config = build(["+experiment=quickstart", "placement=disaggregated", "rollout.tp=1"])
    prompts = [Prompt(index=i, token_ids=[1]) for i in range(100)]
    return RemoteRollouts(
        config, pools.world, train=SimpleNamespace(version=0), weight_sync=sync,
        loader=PromptLoader(prompts, prompts_per_step=2, shuffle=False, seed=1),
        phases=Phases(PhaseTimer(), MemoryTracker(job.device), Residency({})),
        mailbox=Mailbox(pools.messages, [2]) if job.rank == 0 else None,
    )  # fmt: skip


class Transfer:
    """Of weights that are nowhere. The second training rank alone sees that the rollout pool is gone."""

    method, peers = "none", SimpleNamespace(gone=lambda: [2])

    def __init__(self, rank: int) -> None:
        self.rank, self.syncs = rank, 0

    def run(self, version: int) -> SyncReport:
        self.syncs += 1
        match self.rank:
            case 1:
                raise PeerLostError("rank 2 died before it could acknowledge the weights")
            case 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return SyncReport(method="none", version=version)

    def close(self) -> None: ...


def pool_lost_in_a_sync(job: World, port: int, answer: Any, told: str) -> int:
    """Both training ranks have to save and stop. Syncs entered."""
    pools, transfer = split_job(job, 1, port), Transfer(job.rank)
    sync = WeightSync(transfer, group=pools.weights)  # type: ignore[arg-type]
    if job.rank == 2:
        box = Mailbox(pools.messages, [0])
        messages = [box.receive(timeout=20.0)]
        box.send(0, answer)
        if isinstance(answer, Ready):
            sync.run(0)
        messages.append(box.receive(timeout=20.0))
        assert [type(found[1]) for found in messages if found] == [Update, Stop]
        return 0
    rollouts = remote_rollouts(job, pools, sync)
    with pytest.raises(RolloutLostError, match=told):
        rollouts.enter_rollout_mode()
    assert set(rollouts.state_dict()) == ({"loader", "pool"} if job.rank == 0 else set())
    rollouts.close()
    return transfer.syncs


LOST = [
    pytest.param(Ready(), "rank 2 died", 1, -signal.SIGKILL, id="meanwhile"),
    pytest.param(Failed("no engine"), "rank 2 of the job, in the rollout pool, failed: no engine", 0, 0, id="before"),
]


@pytest.mark.parametrize(("answer", "told", "syncs", "end"), LOST)
def test_a_pool_that_is_gone_in_a_sync_is_known_to_all_and_the_rest_is_saved(
    tmp_path: Path, answer, told: str, syncs: int, end: int
) -> None:
    first, second, (code, _) = run_casualties(
        3, pool_lost_in_a_sync, free_port(), answer, told, directory=tmp_path, group=False
    )
    assert first == second == (0, syncs) and code == end


def synced(job: World) -> dict[str, float]:
    report = SyncReport(method="broadcast", version=0, bytes_received=0, seconds=0.5, wait_seconds=0.25)
    pools = SimpleNamespace(world=World(rank=1))  # not the controller
    transfer: Any = SimpleNamespace(method="broadcast", run=lambda version: report)
    rollouts = remote_rollouts(World(rank=1), pools, WeightSync(transfer))  # type: ignore[arg-type]
    assert "sync/seconds" not in rollouts.metrics()
    rollouts.enter_rollout_mode()
    rollouts.enter_rollout_mode()  # the same version
    return rollouts.metrics()


def test_what_a_sync_did_is_in_the_metrics() -> None:
    (found,) = run_ranks(1, synced)
    assert (found["sync/count"], found["sync/seconds"], found["sync/wait_seconds"]) == (1.0, 0.5, 0.25)


def pool_lost_at_a_checkpoint(job: World, port: int) -> str:
    """Two training ranks; the controller alone talks to the pool, but both have to learn that it is gone."""
    pools = split_job(job, 1, port)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rollouts = remote_rollouts(job, pools, WeightSync(Transfer(job.rank), group=pools.weights))  # type: ignore
    with pytest.raises(RolloutLostError, match="rank 2 of the job is gone") as caught:
        rollouts.state_dict()
    assert set(rollouts.state_dict()) == ({"loader", "pool"} if job.rank == 0 else set())
    return str(caught.value)


def test_a_pool_that_is_gone_at_a_checkpoint_is_known_to_all_and_the_rest_is_saved(tmp_path: Path) -> None:
    (_, first), (_, second), (code, _) = run_casualties(
        3, pool_lost_at_a_checkpoint, free_port(), directory=tmp_path, group=False
    )
    assert code == -signal.SIGKILL and first and second


def claiming(world: World, slots: int) -> list[int]:
    """Three replicas; the slow one gets fewer."""
    claims = Claims(20, replica=world.rank, replicas=world.size, slots=slots, key=f"test/{slots}")
    mine = []
    while (position := claims.next()) is not None:
        mine.append(position)
        time.sleep(0.02 if world.rank else 0.2)
    total = 0
    dist.barrier()
    for _ in mine:
        total = claims.add_completed(1)
    dist.barrier()
    assert claims.add_completed(0) == 20 and total <= 20
    return mine


@pytest.mark.parametrize("slots", [1, 2, 50])
def test_every_group_is_claimed_once(slots: int) -> None:
    shares = run_ranks(3, claiming, slots, timeout=60)
    assert sorted(sum(shares, [])) == list(range(20))
    if slots == 50:
        assert shares == [list(range(r, 20, 3)) for r in range(3)]
    else:
        assert len(shares[0]) < min(len(shares[1]), len(shares[2]))


def pool_cut(cut: Cut, ranks: range) -> Cut:
    """``cut`` within a pool; nothing elsewhere."""

    def within(shape, rank, size):
        return cut(shape, rank - ranks.start, len(ranks)) if rank in ranks else None

    return within


def across(job: World, port: int, method: str, dtype: str) -> None:
    """Shards of two training ranks into two rollout ranks of TP 2, three versions; then a change that nobody sent."""
    pools = split_job(job, 2, port)
    a = layout(pool_cut(shard(0), range(2)), 4, "float32")
    b = layout(pool_cut(tensor_parallel(2, 0), range(2, 4)), 4, dtype)
    plan = build_plan(a, b)
    train = Holder(a, job.rank, fill=0) if job.rank < 2 else NoEngine()
    rollout = Holder(b, job.rank) if job.rank >= 2 else NoEngine()
    settings = TransferSettings(world=job, group=pools.weights, timeout_seconds=20)
    transfer = make_transfer(method, train, rollout, plan, settings)
    for version in (1, 2, 3):
        if isinstance(train, Holder):
            train.write(version)
        report = transfer.run(version)
        assert job.rank < 2 or rollout.holds(version), version
        if method != "delta":
            assert report.bytes_received == report.bytes_minimum == plan.minimum_bytes(job.rank)
    if method == "delta":
        if job.rank == 0:
            train.tensors["proj"].view(-1)[3] += 1000.0  # more than bfloat16 rounds away
        report = transfer.run(4)
        assert report.bytes_received <= 64 * 4  # one element, its place, and the counts
        if job.rank == 2:  # what was last received is not what the engine holds any more
            rollout.tensors["embed"].view(-1)[0] += 1.0
        transfer.run(5)  # rewritten from what was received: the damage is gone
        if job.rank >= 2:
            assert not torch.equal(rollout.tensors["proj"], rollout.expected(3)["proj"]) or job.rank == 3
            assert torch.equal(rollout.tensors["embed"], rollout.expected(3)["embed"])
        if job.rank == 2:
            transfer._kept[0][:4] ^= 0xFF
        with pytest.raises((FingerprintMismatchError, PeerError)):
            transfer.run(6)
        transfer.run(7)  # a failed sync is followed by a full one
    transfer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["pull", "broadcast", "delta"])
def test_weights_from_one_pool_to_the_other(method: str, dtype: str) -> None:
    run_ranks(4, across, free_port(), method, dtype, timeout=60, group=False)
