"""Delta: only the elements that changed since the last sync travel, with their places. Exact, for sparse updates.

After a step of reinforcement learning with a small learning rate most bfloat16 weights are bit for bit what they were
(the float32 master weights moved by less than half a unit in the last place). Both ends keep what was last sent, packed
as in ``broadcast``: the source compares with it and sends (place, value) of the words that differ; the target writes
them into its copy and unpacks that into the live weights. Where more than ``DENSE_ABOVE`` of a pair's words changed,
they are sent as they are, without places. The fingerprint compares trainer and engine as for every other transfer, and
a sync that failed is followed by one that sends everything.

The price is memory: one copy, in the rollout dtype, of everything a rank sends or receives, and a second one at the
source while it compares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.transfer.base import SyncReport, TensorSink, TensorSource, TransferSettings
from hybridengine.sync.transfer.chunks import cut
from hybridengine.sync.transfer.collective import CollectiveTransfer
from hybridengine.sync.transfer.tables import BoxTable, TableBuilder

#: Share of changed words from which sending all of them is cheaper: a place takes as much as two to four words.
DENSE_ABOVE = 0.25


class DeltaTransfer(CollectiveTransfer):
    """See the module's text. Arguments and errors as for CollectiveTransfer.

    Raises:
        ValueError: a pair of ranks exchanges more than 2**31 words.
    """

    method = "delta"

    def __init__(self, train: TensorSource, rollout: TensorSink, plan: ReshardPlan, settings: TransferSettings) -> None:
        self._everything = True
        super().__init__(train, rollout, plan, settings)

    def _compile_exchange(self) -> None:
        # One word size for all pairs: the smallest element that travels anywhere.
        widths = {getattr(torch, dtype).itemsize for dtype in self._plan.target.dtype.values()}
        self._word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(widths)]
        self._sent = [self._buffer(self._sends(peer)) for peer in self._peers]
        self._kept = [self._buffer(self._receives(peer)) for peer in self._peers]
        self._fresh = [torch.empty_like(buffer) for buffer in self._sent]
        self._packs = []
        unpack = TableBuilder(self._verifier.ledger, self._device)
        for peer in self._peers:
            pack = TableBuilder(None, self._device)
            for copy, offset in _places(self._sends(peer)):
                pack.pack(copy, self._local, self._fresh[peer].data_ptr() + offset)
            self._packs.append(pack.build())
            for copy, offset in _places(self._receives(peer)):
                unpack.unpack(copy, self._kept[peer].data_ptr() + offset)
        self._unpack = unpack.build()
        self.extra_bytes = sum(b.nbytes for b in (*self._sent, *self._fresh, *self._kept))

    def _agree_on_rounds(self) -> None:
        """There is one."""

    def _buffer(self, copies: list[Copy]) -> torch.Tensor:
        """Room for the packed copies of one pair, in words."""
        nbytes = max((offset + copy.nbytes for copy, offset in _places(copies)), default=0)
        words = -(-nbytes // self._word.itemsize)
        if words >= 2**31:
            raise ValueError(f"sync.method=delta: a pair of ranks exchanges {nbytes / 2**30:.0f} GiB; use broadcast")
        return torch.zeros(words, dtype=self._word, device=self._device)

    def _tables(self) -> Iterator[BoxTable]:
        yield from (self._unpack, *self._packs)

    # -- one sync ----------------------------------------------------------------------------------

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective). Raises WeightSyncError or PeerError on every rank."""
        report = super().run(version)
        self._everything = False
        return report

    def _exchange(self, error: Exception | None) -> tuple[Exception | None, float]:
        parts = [(torch.empty(0, dtype=torch.int32), buffer[:0]) for buffer in self._sent]
        if error is None:
            try:
                parts = [self._changed(peer) for peer in self._peers]
            except Exception as caught:  # noqa: BLE001  the exchange goes on, so that no peer waits for ever
                error = caught
        begin = time.perf_counter()
        received = self._deliver(parts)
        waited = time.perf_counter() - begin
        if error is None:
            try:
                self._own.run(self._verifier.sums)
                self._unpack.run(self._verifier.sums)
            except Exception as caught:  # noqa: BLE001  raised by sync, after the ranks have agreed
                error = caught
        self.bytes_received = received
        self._minimum = self._plan.minimum_bytes(self._rank) if self._everything else received
        self._everything = True  # until this sync is known to have worked everywhere
        return error, waited

    def _changed(self, peer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(places int32 [k], values [k]) of the words that differ from what ``peer`` has; no places: all words."""
        fresh, sent = self._fresh[peer], self._sent[peer]
        self._packs[peer].run(None)
        self._packs[peer].finish()
        places = torch.nonzero(fresh != sent).view(-1)
        if self._everything or len(places) > DENSE_ABOVE * len(fresh):
            found = torch.empty(0, dtype=torch.int32, device=self._device), fresh.clone()
        else:
            found = places.to(torch.int32), fresh[places]
        sent.copy_(fresh)
        return found

    def _deliver(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        """Bring the peers' copies up to date; bytes received."""
        counts = torch.tensor([[len(places), len(values)] for places, values in parts], device=self._device)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        places = self._all_to_all([p for p, _ in parts], coming[:, 0].tolist(), torch.int32)
        values = self._all_to_all([v for _, v in parts], coming[:, 1].tolist(), self._word)
        for kept, where, what in zip(self._kept, places, values, strict=True):
            if len(where):
                kept[where.long()] = what
            elif len(what) == len(kept):
                kept.copy_(what)
        return sum(part.nbytes for part in (*places, *values)) + coming.nbytes

    def _all_to_all(self, parts: list[torch.Tensor], coming: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
        # As bytes: not every backend moves every integer dtype.
        send = torch.cat([part.to(self._device).view(torch.uint8) for part in parts])
        sizes = [count * dtype.itemsize for count in coming]
        receive = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(receive, send, sizes, [part.nbytes for part in parts], group=self._group)
        return [part.view(dtype) for part in receive.split(sizes)]

    def invalidate(self) -> None:
        """The engine's memory may be anything: send everything, and read it back."""
        super().invalidate()
        self._everything = True


def _places(copies: list[Copy]) -> list[tuple[Copy, int]]:
    """Every copy's offset in the packed buffer of its pair, in bytes; the same at both ends."""
    chunks = cut(copies, 2**62, share=False)
    return [(item.copies[0], item.offset) for chunk in chunks for item in chunk.items]
