"""The end of every sync: all ranks agree that it worked, and that the weights are the trainer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.distributed.errors import raise_together
from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.sync.transfer.base import (
    FingerprintMismatchError,
    TensorSink,
    TensorSource,
    TransferSettings,
    WeightSyncError,
)
from hybridengine.sync.transfer.chunks import needs_cast, reading
from hybridengine.sync.transfer.fingerprint import Ledger
from hybridengine.sync.transfer.tables import Sums, TableBuilder, device_of


def settle_by_reading(
    error: BaseException | None,
    what: str,
    *,
    plan: ReshardPlan,
    train: TensorSource,
    rollout: TensorSink,
    settings: TransferSettings,
) -> float:
    """Collective: agree on failure, and compare what both engines hold by reading all of it.

    For transfers that go through an engine's own loader and so can't sum on the way. ``train`` and ``rollout`` offer
    ``local_tensors()`` and ``live_tensors()``.

    Returns:
        seconds it took.

    Raises:
        as :meth:`Verifier.settle`.
    """
    local = train.local_tensors()
    device = device_of(local or rollout.live_tensors())
    verifier = Verifier(plan.source, plan.target, dist.get_rank(settings.group), settings, device)
    verifier.begin()
    try:
        if error is None:
            verifier.read_source(local)
            verifier.read_target(rollout.live_tensors())
    except Exception as caught:  # noqa: BLE001  raised by settle, on all ranks together
        error = caught
    verifier.settle(error, what)
    return verifier.seconds


class Verifier:
    """Sums of one rank and their comparison over all ranks, in one all-reduce of 16 bytes per parameter.

    Attributes:
        ledger: slots for the box tables; None when fingerprints are off.
        sums: uint64 accumulators to hand to the box tables; None when fingerprints are off.
        seconds: time of the passes made only for the fingerprint, and of the comparison, in this sync.
    """

    def __init__(
        self,
        source: ShardMap,
        target: ShardMap,
        rank: int,
        settings: TransferSettings,
        device: torch.device,
        *,
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self._source, self._target, self._rank = source, target, rank
        self._group = settings.group
        self.ledger = Ledger(source, target, rank, skip=skip) if settings.verify else None
        size = 0 if self.ledger is None else self.ledger.size
        self._vector = np.zeros(1 + size, np.uint64)
        self._host_sums = self._vector[1:]
        self._device = device
        self.sums: Sums = None if self.ledger is None else platform.of(device).new_sums(size, device)
        if isinstance(self.sums, np.ndarray):
            self.sums = self._host_sums  # summed where the comparison reads them
        self.seconds = 0.0
        self._local: Mapping[str, torch.Tensor] = {}

    def fusable(self, plan: ReshardPlan) -> set[str]:
        """Parameters whose local copies also serve as the trainer's side of the comparison, for what they read."""
        if self.ledger is None:
            return set()
        elements: dict[str, int] = {}
        for copy in plan.copies(self._rank):
            if copy.is_local:
                elements[copy.param] = elements.get(copy.param, 0) + copy.box.numel
        return self.ledger.fusable(elements)

    def covered(self, plan: ReshardPlan, read_by_owner: Callable[[Copy], bool] = needs_cast) -> set[str]:
        """Parameters of which this rank reads its own shard once in any case: what it serves itself, and what it reads
        for others, ``read_by_owner``."""
        if self.ledger is None:
            return set()
        mine = [copy for copy in plan.copies(self._rank) if copy.is_local]
        # What others read themselves is not read here: then these are not all the reads.
        distinct = {reading(copy): copy for copy in filter(read_by_owner, (*mine, *plan.sends(self._rank)))}
        elements: dict[str, int] = {}
        for copy in distinct.values():
            elements[copy.param] = elements.get(copy.param, 0) + copy.box.numel
        return self.ledger.covered(elements)

    def add_source(
        self,
        table: TableBuilder,
        local: Mapping[str, torch.Tensor],
        fused: Collection[str] = (),
        covered: Collection[str] = (),
    ) -> None:
        """Add to ``table`` the reads of this rank's shards that nothing else makes: what it copies to itself of
        ``fused`` parameters is read already, and all of ``covered`` ones."""
        self._local = local
        if self.ledger is None:
            return
        for read in self.ledger.source_reads(fused, covered):
            dtypes = self._source.dtype[read.param], self._target.dtype[read.param]
            table.read(read, local, *dtypes, slot=self.ledger.source_slot(read.param))

    def begin(self) -> None:
        self._vector[:] = 0
        if isinstance(self.sums, torch.Tensor):
            self.sums.zero_()
        self.seconds = 0.0

    def read_source(self, local: Mapping[str, torch.Tensor]) -> None:
        """Replace the trainer's side by a reading of its own, through the training layout alone. Call after the weights
        are final."""
        if self.ledger is None or self.sums is None:
            return
        begin = time.perf_counter()
        table = TableBuilder(None, self._device)
        self.add_source(table, local)
        self.sums[len(self.ledger.params) :] = 0
        table.build().run(self.sums)
        self.seconds += time.perf_counter() - begin

    def read_target(self, live: Mapping[str, torch.Tensor]) -> None:
        """Replace the engine's side by what its live memory holds, found through the rollout layout alone."""
        if self.ledger is None or self.sums is None:
            return
        begin = time.perf_counter()
        rows = TableBuilder(None, self._device)
        for read in self.ledger.target_reads():
            dtype = self._target.dtype[read.param]
            slot = self.ledger.target_slot(read.param)
            rows.read(read, live, dtype, dtype, slot=slot)
        self.sums[: len(self.ledger.params)] = 0
        rows.build().run(self.sums)
        self.seconds += time.perf_counter() - begin

    def total(self) -> np.ndarray:
        """This rank's sums of this sync, uint64 [2 * parameters], on the host."""
        begin = time.perf_counter()
        if isinstance(self.sums, torch.Tensor):
            self._host_sums += self.sums.cpu().numpy().view(np.uint64)
            self.sums.zero_()
        self.seconds += time.perf_counter() - begin
        return self._host_sums

    def compare(self, sums: np.ndarray, what: str) -> None:
        """Raise FingerprintMismatchError unless both sides of ``sums``, added up over all ranks, agree.

        Collective where they do not: weights that are NaN, whose bits casts may change, are called so.
        """
        begin = time.perf_counter()
        if self.ledger is not None and (wrong := self.ledger.mismatches(sums)):
            if nan := self._with_nan(wrong):
                raise WeightSyncError(
                    f"{what}: the trainer's weights are NaN in {len(nan)} of {len(self.ledger.params)} parameters, "
                    f"first {nan[0]}. A training step made them so; see the steps before (grad_norm, lr), and resume "
                    "from an earlier checkpoint"
                )
            names = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            raise FingerprintMismatchError(
                f"{what}: {len(wrong)} of {len(self.ledger.params)} parameters arrived different from what the trainer "
                f"holds: {names}. Weights changed during the sync, or were read before they were final."
            )
        self.seconds += time.perf_counter() - begin

    def _with_nan(self, params: list[str]) -> list[str]:
        """Collective: those of ``params`` of which a rank's shard holds NaN."""
        found = torch.zeros(len(params), dtype=torch.int64)
        for place, name in enumerate(params):
            pattern, tensors = self._source.holdings[name]
            for piece in pattern.ranks[self._rank]:
                tensor = self._local.get(tensors[piece.slot])
                if tensor is not None and bool(torch.isnan(tensor).any()):
                    found[place] = 1
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [name for name, held in zip(params, found.tolist(), strict=True) if held]

    def settle(self, error: BaseException | None, what: str) -> None:
        """Collective: agree on failure and compare both sides, in one all-reduce.

        Raises:
            ``error`` on the rank that has one, PeerError on the others; FingerprintMismatchError on all. A rank that
            is lost meanwhile breaks the all-reduce: what that raises, or the rank's own ``error``.
        """
        self.total()
        begin = time.perf_counter()
        self._vector[0] = error is not None
        try:
            dist.all_reduce(torch.from_numpy(self._vector.view(np.int64)), group=self._group)  # wraps mod 2**64
        except RuntimeError:
            if error is not None:
                raise error  # noqa: B904  says more than that the ranks could not agree
            raise
        self.seconds += time.perf_counter() - begin
        if self._vector[0]:
            raise_together(error, what, self._group)
        self.compare(self._host_sums, what)
