"""Which handoff runs: by name, or chosen from what the job looks like and said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.base import HandoffSettings, WeightHandoff
from hybridengine.sync.transfer.checkpoint import CheckpointHandoff
from hybridengine.sync.transfer.collective import BroadcastHandoff, CollectiveHandoff
from hybridengine.sync.transfer.delta import DeltaHandoff
from hybridengine.sync.transfer.gather import GatherHandoff
from hybridengine.sync.transfer.links import node_of
from hybridengine.sync.transfer.pull import PullHandoff

log = logging.getLogger(__name__)

HANDOFFS: dict[str, Callable[..., WeightHandoff]] = {
    "pull": PullHandoff,
    "collective": CollectiveHandoff,
    "gather": GatherHandoff,
    "broadcast": BroadcastHandoff,
    "delta": DeltaHandoff,
    "checkpoint": CheckpointHandoff,
}


def make_handoff(
    method: str, train: Any, rollout: Any, plan: ReshardPlan | None, settings: HandoffSettings
) -> WeightHandoff:
    """Build the handoff ``method``, or, for ``"auto"``, the one that fits (collective).

    Args:
        plan: from ``train.shard_map()`` to ``rollout.shard_map()``; None for an engine that describes no layout.

    Raises:
        ValueError: unknown method; a method that needs a plan without one; tensors that do not fit the plan.
    """
    if method == "auto":
        method, why = choose(plan, settings)
        if settings.world.is_main:
            log.info("handoff.method=auto: %s, because %s", method, why)
    if method not in HANDOFFS:
        raise ValueError(f"handoff.method={method!r}; it must be auto or one of {', '.join(HANDOFFS)}")
    if plan is None and method != "gather":
        raise ValueError(f"handoff.method={method} needs a reshard plan, and the rollout engine describes no layout")
    return HANDOFFS[method](train, rollout, plan, settings)


def choose(plan: ReshardPlan | None, settings: HandoffSettings) -> tuple[str, str]:
    """(method, reason), the same on every rank (collective)."""
    if plan is None:
        return "gather", "the rollout engine describes no layout to plan for"
    exchange = "broadcast" if settings.apart else "collective"
    nodes = node_of(settings.group)
    if len(set(nodes)) > 1:
        return exchange, f"the ranks are on {len(set(nodes))} nodes"
    if settings.world.is_cuda and settings.weights_leave and len(nodes) > 1:
        return exchange, "GPU memory that peers map can't leave the device (memory.offload_weights=true)"
    if settings.world.is_cuda:
        return exchange, "pull through CUDA IPC is slow where dtypes differ; handoff.method=pull tries it"
    return "pull", "all ranks are on one node"
