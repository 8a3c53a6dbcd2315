"""Collective: the same plan as bucketed all-to-all exchanges. For ranks that cannot map each other's memory.

Every pair of ranks has its list of copies, cut into chunks; round k exchanges chunk k of every pair. A round
is: pack (cast to the rollout dtype at the source), one all-to-all, unpack into live weights. Two sets of
buffers are used in turn, so that round k is unpacked and round k + 2 packed while round k + 1 is on its way.

A rank that fails keeps exchanging until the last round, so that nobody waits in a collective; all ranks then
raise together. A rank that is lost breaks the exchange: the others raise at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.distributed.links import PeerLinks
from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.transfer.base import SyncReport, TensorSink, TensorSource, TransferSettings
from hybridengine.sync.transfer.chunks import Chunk, cut
from hybridengine.sync.transfer.region import ALIGNMENT
from hybridengine.sync.transfer.tables import BoxTable, TableBuilder, TensorWatch, check_copies, device_of
from hybridengine.sync.transfer.verify import Verifier


@dataclass(slots=True)
class _Round:
    """One exchange: tables that fill the send buffer and empty the receive buffer, and bytes per peer."""

    pack: BoxTable
    unpack: BoxTable
    send_bytes: list[int]
    receive_bytes: list[int]


class CollectiveTransfer:
    """See the module's text. Arguments and errors as for PullTransfer; ranks may be on any nodes."""

    method = "collective"
    holds_shards = False
    bytes_aliased = 0

    def __init__(self, train: TensorSource, rollout: TensorSink, plan: ReshardPlan, settings: TransferSettings) -> None:
        self._train, self._rollout, self._plan, self._settings = train, rollout, plan, settings
        self._group = settings.group
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.peers = PeerLinks.connect(group=self._group)
        self._proven = not settings.verify
        self._rounds: list[_Round] = []
        with agree("setting up the weight transfer", self._group):
            self._compile()
            self._compile_exchange()
        self._agree_on_rounds()

    def _compile(self) -> None:
        """What does not depend on how the bytes travel: checks, fingerprints, this rank's own copies."""
        plan, rank = self._plan, self._rank
        if plan.world_size != self._size:
            raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {self._size}")
        live = dict(self._rollout.live_tensors())
        self._local = dict(self._train.local_tensors())
        check_copies(plan, rank, self._local, live)
        self._local_watch = TensorWatch("training", self._local, self._local, fixed=False)
        self._live_watch = TensorWatch("rollout", live, live, fixed=False)
        self._device = device_of(self._local or live)
        self._verifier = Verifier(plan.source, plan.target, rank, self._settings, self._device)
        fused = self._verifier.fusable(plan)
        own = TableBuilder(self._verifier.ledger, self._device)
        for copy in plan.copies(rank):
            if copy.is_local:
                own.copy(copy, self._local, count_source=copy.param in fused)
        self._verifier.add_source(own, self._local, fused)
        self._own = own.build()
        self.bytes_received, self._minimum = plan.received_bytes(rank), plan.minimum_bytes(rank)

    def _compile_exchange(self) -> None:
        # Two send and two receive buffers share the bucket; a buffer holds one chunk per peer.
        limit = self._settings.bucket_bytes // (4 * max(1, self._size - 1))
        if limit < ALIGNMENT:
            raise ValueError(f"sync.bucket_mib={self._settings.bucket_mib} is too small for {self._size} ranks")
        sends = [cut(self._sends(peer), limit, share=False) for peer in self._peers]
        receives = [cut(self._receives(peer), limit, share=False) for peer in self._peers]
        count = max(len(chunks) for chunks in (*sends, *receives))
        send_size = max((_total(sends, k) for k in range(count)), default=0)
        receive_size = max((_total(receives, k) for k in range(count)), default=0)
        self._send = [torch.empty(send_size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._receive = [torch.empty(receive_size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self.extra_bytes = sum(buffer.numel() for buffer in (*self._send, *self._receive))
        self._rounds = [self._round(k, sends, receives) for k in range(count)]

    def _agree_on_rounds(self) -> None:
        """All ranks must run as many rounds as the busiest pair needs."""
        rounds = torch.tensor([len(self._rounds)])
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX, group=self._group)
        empty = TableBuilder(None, self._device).build()
        zeros = [0] * self._size
        self._rounds += [_Round(empty, empty, zeros, zeros)] * (int(rounds) - len(self._rounds))

    @property
    def _peers(self) -> range:
        return range(self._size)

    def _sends(self, peer: int) -> list[Copy]:
        return [copy for copy in self._plan.sends(self._rank) if copy.target_rank == peer]

    def _receives(self, peer: int) -> list[Copy]:
        return [copy for copy in self._plan.copies(self._rank) if copy.source_rank == peer != self._rank]

    def _tables(self) -> Iterator[BoxTable]:
        """Those of the exchange, to be aimed at where tensors are."""
        for this in self._rounds:
            yield from (this.pack, this.unpack)

    def _round(self, k: int, sends: list[list[Chunk]], receives: list[list[Chunk]]) -> _Round:
        pack, unpack = TableBuilder(None, self._device), TableBuilder(self._verifier.ledger, self._device)
        send_bytes: list[int] = []
        receive_bytes: list[int] = []
        for peer in self._peers:
            chunk = sends[peer][k] if k < len(sends[peer]) else Chunk((), 0)
            for item in chunk.items:
                offset = sum(send_bytes) + item.offset
                pack.pack(item.copies[0], self._local, self._send[k % 2].data_ptr() + offset)
            send_bytes.append(chunk.nbytes)
            chunk = receives[peer][k] if k < len(receives[peer]) else Chunk((), 0)
            for item in chunk.items:
                offset = sum(receive_bytes) + item.offset
                unpack.unpack(item.copies[0], self._receive[k % 2].data_ptr() + offset)
            receive_bytes.append(chunk.nbytes)
        return _Round(pack.build(), unpack.build(), send_bytes, receive_bytes)

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective). Raises WeightSyncError or PeerError on every rank."""
        begin = time.perf_counter()
        self._verifier.begin()
        error: Exception | None = None
        live: dict[str, torch.Tensor] = {}
        try:
            local = self._train.local_tensors()
            self._local_watch.check(local)
            live = self._rollout.live_tensors()
            self._live_watch.check(live)
            for table in (self._own, *self._tables()):
                table.aim(live, local)
        except Exception as caught:  # noqa: BLE001  raised below, after the ranks have agreed
            error = caught
        error, wait_seconds = self._exchange(error)
        if error is None:
            try:
                if not self._proven:
                    self._verifier.read_target(live)
            except Exception as caught:  # noqa: BLE001
                error = caught
        self._verifier.settle(error, f"weight sync to policy version {version}")
        full_check, self._proven = not self._proven, True
        return SyncReport(
            method=self.method,
            version=version,
            bytes_received=self.bytes_received,
            bytes_minimum=self._minimum,
            bytes_local=self._own.nbytes,
            extra_bytes=self.extra_bytes,
            rounds=max(1, len(self._rounds)),
            seconds=time.perf_counter() - begin,
            wait_seconds=wait_seconds,
            fingerprint_seconds=self._verifier.seconds,
            full_check=full_check,
        )

    def _exchange(self, error: Exception | None) -> tuple[Exception | None, float]:
        """All rounds, and this rank's own copies while the first one is on its way."""
        waited = 0.0
        work: list[Any] = []
        sums = self._verifier.sums

        def guarded(table: BoxTable, sums: Any) -> None:
            nonlocal error
            if error is None:
                try:
                    table.run(sums)
                except Exception as caught:  # noqa: BLE001  the exchange goes on, so that no peer waits for ever
                    error = caught

        for k in range(len(self._rounds) + 1):
            if k < len(self._rounds):
                guarded(self._rounds[k].pack, None)
                work.append(self._start(k))
            if k == 0:
                guarded(self._own, sums)
            else:
                begin = time.perf_counter()
                work[k - 1].wait()
                waited += time.perf_counter() - begin
                guarded(self._rounds[k - 1].unpack, sums)
        return error, waited

    def _start(self, k: int) -> Any:
        this = self._rounds[k]
        send = self._send[k % 2][: sum(this.send_bytes)]
        receive = self._receive[k % 2][: sum(this.receive_bytes)]
        return dist.all_to_all_single(
            receive, send, this.receive_bytes, this.send_bytes, group=self._group, async_op=True
        )

    def invalidate(self) -> None:
        """The engine's memory is another than before: read it back after the next sync."""
        self._proven = not self._settings.verify

    def close(self) -> None:
        """Nothing is exported."""
        self.peers.close()


class BroadcastTransfer(CollectiveTransfer):
    """The same between two pools of ranks: each rollout rank receives its own slices and nothing else."""

    method = "broadcast"


def _total(lists: list[list[Chunk]], k: int) -> int:
    return sum(chunks[k].nbytes for chunks in lists if k < len(chunks))
