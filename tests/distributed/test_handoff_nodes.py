"""Ranks of several nodes, as far as one machine can play them: what is read from where, and which handoff runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridengine.distributed.world import World
from hybridengine.placement.engines import plan_handoff
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer import links, peers, pull
from hybridengine.sync.transfer.base import HandoffSettings
from hybridengine.sync.transfer.collective import CollectiveHandoff
from hybridengine.sync.transfer.links import node_of
from hybridengine.sync.transfer.pull import PullHandoff
from hybridengine.sync.transfer.registry import make_handoff
from tests.distributed.layouts import Holder, layout, only, shard, tensor_parallel
from tests.distributed.ranks import run_ranks


def live_on(node: str) -> None:
    for module in (links, pull, peers):
        module.node_identity = lambda: node


def own_node_first(world: World) -> None:
    """Ranks 0 and 1 on one node, 2 and 3 on another; whole parameters on ranks 0 and 2."""
    live_on("ab"[world.rank // 2])
    assert node_of(None) == [0, 0, 1, 1]
    source, target = layout(only({0, 2}), 4, "float32"), layout(tensor_parallel(1, 0), 4, "float32")
    plan = plan_handoff(source, target)
    assert [{copy.source_rank for copy in plan.copies(rank)} for rank in range(4)] == [{0}, {0}, {2}, {2}]
    careless = build_plan(source, target)
    assert {copy.source_rank for rank in (1, 3) for copy in careless.copies(rank)} == {0, 2}
    assert any(copy.source_rank != 2 for copy in careless.copies(3))


def auto_across_nodes(world: World) -> None:
    for nodes, kind in (("aa", PullHandoff), ("ab", CollectiveHandoff)):
        live_on(nodes[world.rank])
        a, b = layout(shard(0), 2, "float32"), layout(tensor_parallel(1, 0), 2, "bfloat16")
        train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
        settings = HandoffSettings(world=world, timeout_seconds=20)
        handoff = make_handoff("auto", train, rollout, plan_handoff(a, b), settings)
        assert type(handoff) is kind
        for version in (1, 2):
            train.write(version)
            handoff.sync(version)
            assert rollout.holds(version)
        handoff.close()


def pull_across_nodes(world: World) -> None:
    live_on("ab"[world.rank])
    a = layout(shard(0), 2, "float32")
    train, rollout = Holder(a, world.rank, fill=0), Holder(a, world.rank)
    with pytest.raises(ValueError, match=r"ranks \[1\] are not on rank 0's node: use handoff.method=collective"):
        make_handoff("pull", train, rollout, plan_handoff(a, a), HandoffSettings(world=world, timeout_seconds=20))


def other_layouts(world: World) -> None:
    """Rank 1 cuts the trainer's parameters otherwise: without a word, copies would go to wrong places."""
    target = layout(tensor_parallel(1, 0), 2, "float32")
    with pytest.raises(ValueError, match=r"ranks \[1\] describe other layouts than rank 0"):
        plan_handoff(layout(shard(world.rank), 2, "float32"), target)


@pytest.mark.parametrize(
    ("scene", "size"),
    [(own_node_first, 4), (auto_across_nodes, 2), (pull_across_nodes, 2), (other_layouts, 2)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_nodes(scene: Callable[[World], None], size: int) -> None:
    run_ranks(size, scene, timeout=60)
