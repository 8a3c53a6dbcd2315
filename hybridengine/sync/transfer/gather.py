"""Gather: every parameter in full on every rank, through the engine's own loader. The baseline of the others."""

from __future__ import annotations

import time

import torch.distributed as dist

from hybridengine.distributed.links import PeerLinks
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.base import SyncReport, TensorSink, TensorSource, TransferSettings
from hybridengine.sync.transfer.verify import settle_by_reading


class GatherTransfer:
    """See the module's text.

    Args:
        plan: gives the layouts for the fingerprint.
    """

    method = "gather"
    holds_shards = False
    bytes_aliased = 0

    def __init__(self, train: TensorSource, rollout: TensorSink, plan: ReshardPlan, settings: TransferSettings) -> None:
        self._train, self._rollout, self._plan = train, rollout, plan
        self._rank = dist.get_rank(settings.group)
        self.peers = PeerLinks.connect(group=settings.group)
        self._settings = settings

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective). Raises WeightSyncError or PeerError on every rank.

        A loader that fails on one rank does not stop the gathering, so that no rank waits in a collective.
        """
        begin = time.perf_counter()
        error: Exception | None = None
        received = 0
        for name, full in self._train.full_parameters():
            received += full.numel() * full.element_size()
            if error is None:
                try:
                    self._rollout.load_weight(name, full)
                except Exception as caught:  # noqa: BLE001  raised below, after the ranks have agreed
                    error = caught
        what = f"weight sync to policy version {version}"
        held = sum(tensor.numel() * tensor.element_size() for tensor in self._train.local_tensors().values())
        seconds = settle_by_reading(
            error, what, plan=self._plan, train=self._train, rollout=self._rollout, settings=self._settings
        )
        return SyncReport(
            method=self.method,
            version=version,
            bytes_received=received - held,
            bytes_minimum=self._plan.minimum_bytes(self._rank),
            seconds=time.perf_counter() - begin,
            fingerprint_seconds=seconds,
            full_check=self._settings.verify,
        )

    def invalidate(self) -> None:
        """Every sync is read back anyway."""

    def close(self) -> None:
        """Nothing is exported."""
        self.peers.close()
