"""Gather: every parameter in full on every rank, through the engine's own loader. The baseline, and the way
for engines or layouts that no plan describes."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from hybridengine.distributed.errors import raise_together
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.base import HandoffSettings, SyncReport
from hybridengine.sync.transfer.peers import Survivors, names_lost_ranks
from hybridengine.sync.verify import settle_by_reading


class GatherHandoff:
    """See the module's text.

    Args:
        train: offers ``full_parameters()``; for the fingerprint also ``local_tensors()``.
        rollout: offers ``load_weight(name, full)``; for the fingerprint also ``live_tensors()``.
        plan: gives the layouts for the fingerprint; None leaves the fingerprint out.
    """

    method = "gather"
    aliases = False

    def __init__(self, train: Any, rollout: Any, plan: ReshardPlan | None, settings: HandoffSettings) -> None:
        self._train, self._rollout, self._plan = train, rollout, plan
        self._rank = dist.get_rank(settings.group)
        self.survivors = Survivors(settings.group)
        if settings.verify and plan is None:
            raise ValueError("handoff.verify=true needs the layouts of both engines; this engine describes none")
        self._settings = settings

    @names_lost_ranks
    def sync(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective). Raises HandoffError or PeerError on every rank.

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
        held, seconds = 0, 0.0
        if self._plan is not None:
            held = sum(tensor.numel() * tensor.element_size() for tensor in self._train.local_tensors().values())
            seconds = settle_by_reading(
                error, what, plan=self._plan, train=self._train, rollout=self._rollout, settings=self._settings
            )
        else:
            raise_together(error, what, self._settings.group)
        return SyncReport(
            method=self.method,
            version=version,
            bytes_received=received - held,
            bytes_minimum=self._plan.minimum_bytes(self._rank) if self._plan is not None else 0,
            seconds=time.perf_counter() - begin,
            fingerprint_seconds=seconds,
            full_check=self._settings.verify,
        )

    def distrust(self) -> None:
        """Every sync is read back anyway."""

    def close(self) -> None:
        """Nothing is exported."""
        self.survivors.close()
