"""Ranks of several nodes, as far as one machine can play them: what is read from where, and which transfer runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridengine.distributed import links
from hybridengine.distributed.links import node_of
from hybridengine.distributed.world import World
from hybridengine.placement.parts import plan_transfer
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer import pull
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.collective import CollectiveTransfer
from hybridengine.sync.transfer.pull import PullTransfer
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.layouts import Holder, layout, only, shard, tensor_parallel
from tests.distributed.ranks import run_ranks


def live_on(node: str) -> None:
    for module in (links, pull):
        module.node_identity = lambda: node


def own_node_first(world: World) -> None:
    """Ranks 0 and 1 on one node, 2 and 3 on another; whole parameters on ranks 0 and 2."""
    live_on("ab"[world.rank // 2])
    assert node_of(None) == [0, 0, 1, 1]
    source, target = layout(only({0, 2}), 4, "float32"), layout(tensor_parallel(1, 0), 4, "float32")
    plan = plan_transfer(source, target)
    assert [{copy.source_rank for copy in plan.copies(rank)} for rank in range(4)] == [{0}, {0}, {2}, {2}]
    careless = build_plan(source, target)
    assert {copy.source_rank for rank in (1, 3) for copy in careless.copies(rank)} == {0, 2}
    assert any(copy.source_rank != 2 for copy in careless.copies(3))


def auto_across_nodes(world: World) -> None:
    for nodes, kind in (("aa", PullTransfer), ("ab", CollectiveTransfer)):
        live_on(nodes[world.rank])
        a, b = layout(shard(0), 2, "float32"), layout(tensor_parallel(1, 0), 2, "bfloat16")
        train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
        settings = TransferSettings(world=world, timeout_seconds=20)
        transfer = make_transfer("auto", train, rollout, plan_transfer(a, b), settings)
        assert type(transfer) is kind
        for version in (1, 2):
            train.write(version)
            transfer.run(version)
            assert rollout.holds(version)
        transfer.close()


def pull_across_nodes(world: World) -> None:
    live_on("ab"[world.rank])
    a = layout(shard(0), 2, "float32")
    train, rollout = Holder(a, world.rank, fill=0), Holder(a, world.rank)
    with pytest.raises(ValueError, match=r"ranks \[1\] are not on rank 0's node: use sync.method=collective"):
        make_transfer("pull", train, rollout, plan_transfer(a, a), TransferSettings(world=world, timeout_seconds=20))


def other_layouts(world: World) -> None:
    """Rank 1 cuts the trainer's parameters otherwise: without a word, copies would go to wrong places."""
    target = layout(tensor_parallel(1, 0), 2, "float32")
    with pytest.raises(ValueError, match=r"ranks \[1\] describe other layouts than rank 0"):
        plan_transfer(layout(shard(world.rank), 2, "float32"), target)


@pytest.mark.parametrize(
    ("scene", "size"),
    [(own_node_first, 4), (auto_across_nodes, 2), (pull_across_nodes, 2), (other_layouts, 2)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_nodes(scene: Callable[[World], None], size: int) -> None:
    run_ranks(size, scene, timeout=60)
