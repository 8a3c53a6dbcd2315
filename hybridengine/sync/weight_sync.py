"""WeightSync: the steps around every transfer of weights, whichever ranks take part.

    begin      every rank is ready and its rollout engine unservable          agreed before anything collective starts
    transfer   weights move along the plan
    verify     the fingerprints of both sides are compared                    by the transfer, on all ranks alike
    finish     rollout engines drop caches of older weights and serve the new version             agreed

A failure anywhere is the same failure everywhere: the engines keep their old version number and stay unservable, and
the sync can be tried again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from hybridengine.distributed.errors import PeerLostError, agree
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.sync.transfer.base import SyncReport, WeightTransfer


class WeightSync:
    """Brings rollout engines to a policy version. All ranks of ``group`` call :meth:`run` alike.

    Args:
        transfer: moves the weights and compares fingerprints.
        begin: makes this rank's rollout engine ready to be written; nothing on a rank that has none.
        finish: makes it serve the version that it is given.
        group: ranks of the transfer; None: all.

    Attributes:
        report: of the last sync on this rank.
        count: syncs so far.
    """

    def __init__(
        self,
        transfer: WeightTransfer,
        *,
        begin: Callable[[], None] = lambda: None,
        finish: Callable[[int], None] = lambda version: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.transfer, self._begin, self._finish, self._group = transfer, begin, finish, group
        self.report: SyncReport | None = None
        self.count = 0

    @classmethod
    def into(cls, engine: RolloutEngine, transfer: WeightTransfer) -> WeightSync:
        """Into the engine of this rank."""
        return cls(transfer, begin=engine.begin_update, finish=engine.finish_update)

    def run(self, version: int) -> None:
        """Deliver policy ``version``.

        Raises:
            what failed on this rank; PeerError where another rank failed; PeerLostError, on every survivor, where one
            was lost.
        """
        what = f"weight sync to policy version {version}"
        try:
            with agree(f"beginning the {what}", self._group):
                self._begin()
            self.report = self.transfer.run(version)
            with agree(f"finishing the {what}", self._group):
                self._finish(version)
        except RuntimeError as error:
            if not is_broken_collective(error):
                raise
            raise PeerLostError(f"{what}: {self._lost()}: {error}") from error
        self.count += 1

    def metrics(self) -> dict[str, float]:
        """``sync/count`` so far, and what the last one did on this rank (``SyncReport.metrics``)."""
        found = {"sync/count": float(self.count)}
        return found | self.report.metrics() if self.report is not None else found

    def close(self) -> None:
        """Release what the transfer has exported or mapped."""
        self.transfer.close()

    def _lost(self) -> str:
        match self.transfer.peers.gone():
            case []:
                return "a rank was lost or late (distributed.timeout_seconds); none of this node has ended"
            case [rank]:
                return f"rank {rank} died"
            case ranks:
                return f"ranks {ranks} have ended"


def is_broken_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed lost a connection. Gloo raises plain RuntimeErrors that begin with their file."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
