"""Which transfer runs: by name, or chosen from what the job looks like."""

from __future__ import annotations

from collections.abc import Callable

from hybridengine.distributed.links import node_of
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.base import NoEngine, TensorSink, TensorSource, TransferSettings, WeightTransfer
from hybridengine.sync.transfer.checkpoint import CheckpointTransfer
from hybridengine.sync.transfer.collective import BroadcastTransfer, CollectiveTransfer
from hybridengine.sync.transfer.delta import DeltaTransfer
from hybridengine.sync.transfer.gather import GatherTransfer
from hybridengine.sync.transfer.pull import PullTransfer
from hybridengine.sync.transfer.regions import why_not_mapped

#: sync.method -> its class. A new transfer is one file and one line here.
TRANSFERS: dict[str, Callable[[TensorSource, TensorSink, ReshardPlan, TransferSettings], WeightTransfer]] = {
    "pull": PullTransfer,
    "collective": CollectiveTransfer,
    "gather": GatherTransfer,
    "broadcast": BroadcastTransfer,
    "delta": DeltaTransfer,
    "checkpoint": CheckpointTransfer,
}


def make_transfer(
    method: str,
    train: TensorSource | None,
    rollout: TensorSink | None,
    plan: ReshardPlan,
    settings: TransferSettings,
    *,
    log_rank0: Callable[[str], None] = lambda text: None,
) -> WeightTransfer:
    """Build the transfer ``method``, or, for ``"auto"``, the one that fits (collective).

    Args:
        train, rollout: this rank's engines; None where it has none of the kind.
        plan: from ``train.shard_map()`` to ``rollout.layout()`` of all ranks.
        log_rank0: prints what was chosen and why.

    Raises:
        ValueError: unknown method; tensors that do not fit the plan.
    """
    why = ""
    if method == "auto":
        method, reason = choose(settings)
        why = f" (auto: {reason})"
    if method not in TRANSFERS:
        raise ValueError(f"sync.method={method!r}; it must be auto or one of {', '.join(TRANSFERS)}")
    transfer = TRANSFERS[method](train or NoEngine(), rollout or NoEngine(), plan, settings)
    log_rank0(f"weight sync: {method}{why}\n{plan.explain()}")
    if transfer.bytes_aliased:
        shared = transfer.bytes_aliased / 1e9
        log_rank0(f"  aliased: {shared:.3f} GB of a rank's rollout weights are the trainer's own memory")
    return transfer


def choose(settings: TransferSettings) -> tuple[str, str]:
    """(method, reason), the same on every rank (collective)."""
    exchange = "broadcast" if settings.disaggregated else "collective"
    nodes = node_of(settings.group)
    if len(set(nodes)) > 1:
        return exchange, f"the ranks are on {len(set(nodes))} nodes"
    if reason := why_not_mapped(settings.world.device, settings.group):
        return exchange, f"ranks can't map each other's memory: {reason}"
    return "pull", "all ranks are on one node"
