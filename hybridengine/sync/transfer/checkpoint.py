"""Checkpoint: weights through safetensors files that the rollout ranks read again. The slow way that always works."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.distributed.links import PeerLinks
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.base import NoEngine, SyncReport, TensorSink, TensorSource, TransferSettings
from hybridengine.sync.transfer.verify import settle_by_reading


class CheckpointTransfer:
    """The training ranks export, the rollout ranks load parameter by parameter through the engine's own loader.

    The files lie in a temporary directory of the machine of rank 0 (or in ``TMPDIR``, which has to be shared when the
    ranks are on several nodes) and are replaced at every sync.
    """

    method = "checkpoint"
    holds_shards = False
    bytes_aliased = 0

    def __init__(self, train: TensorSource, rollout: TensorSink, plan: ReshardPlan, settings: TransferSettings) -> None:
        self._train, self._rollout, self._plan, self._settings = train, rollout, plan, settings
        self._rank = dist.get_rank(settings.group)
        self.peers = PeerLinks.connect(group=settings.group)
        box = [tempfile.mkdtemp(prefix="hybridengine-") if self._rank == 0 else None]
        dist.broadcast_object_list(box, group=settings.group, group_src=0)
        self._directory = Path(str(box[0]))

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective). Raises WeightSyncError or PeerError on every rank."""
        begin = time.perf_counter()
        path = self._directory / str(version)
        group = self._settings.group
        with agree(f"writing the weights of policy version {version}", group):
            self._train.export(path)
        received = 0
        error: Exception | None = None
        try:
            if not isinstance(self._rollout, NoEngine):
                source = SafetensorsSource(path)
                for name in self._plan.target.params:
                    full = source[name]
                    received += full.nbytes
                    self._rollout.load_weight(name, full)
        except Exception as caught:  # noqa: BLE001  raised below, after the ranks have agreed
            error = caught
        seconds = settle_by_reading(
            error, f"weight sync to policy version {version}",
            plan=self._plan, train=self._train, rollout=self._rollout, settings=self._settings,
        )  # fmt: skip
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        return SyncReport(
            method=self.method,
            version=version,
            bytes_received=received,
            bytes_minimum=self._plan.minimum_bytes(self._rank),
            seconds=time.perf_counter() - begin,
            fingerprint_seconds=seconds,
            full_check=self._settings.verify,
        )

    def invalidate(self) -> None:
        """Every sync is read back anyway."""

    def close(self) -> None:
        self.peers.close()
        if self._rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
