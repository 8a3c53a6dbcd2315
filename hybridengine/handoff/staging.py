"""Staged transfer inside a pull: slices whose dtype changes are cast by their owner into a shared ring of slots.

The owner cuts what others read from it into chunks and fills the ring's slots in turn; each reader copies its
part of a chunk into live engine tensors and marks it drained; a slot is filled again once all readers of its
chunk have drained it. A rank is owner and reader at once and never blocks while it can do either.

Where the owner's engine needs what others read, the owner is one of the readers: its float32 shard is the larger
part of the bytes and is read from memory once for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hybridengine.handoff.control import ControlPage, Waiter, chunk_mark
from hybridengine.handoff.region import MappedRegion, Region
from hybridengine.handoff.schedule import Chunk, cut, largest, needs_cast, reading
from hybridengine.handoff.tables import BoxTable, Source, Sums, TableBuilder
from hybridengine.native import Stores
from hybridengine.reshard.fingerprint import Ledger
from hybridengine.reshard.plan import Copy, ReshardPlan

#: On the CPU chunks are no larger than this. Smaller ones fit nearer caches, but waiting for each other costs more.
_CHUNK_BYTES = 4 * 2**20
#: How far an owner may run ahead of its readers.
_SLOTS = 8


class StagedChunks:
    """What one rank fills and drains in every sync. Pure planning until :meth:`compile`.

    Attributes:
        nbytes: size of this rank's ring, at most the bucket.
        rounds: most chunks that any rank fills.
        shared: this rank's local copies that go through its own ring.
        kept: bytes they write per sync.
        received: bytes this rank drains from others per sync, in the rollout dtype (after :meth:`compile`).
    """

    def __init__(self, plan: ReshardPlan, rank: int, size: int, bucket_bytes: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        limit = bucket_bytes // 2 if device.type == "cuda" else min(bucket_bytes // 2, _CHUNK_BYTES)
        self._chunks: dict[int, list[Chunk]] = {
            owner: cut(_staged_copies(plan, owner), limit, share=True) for owner in range(size)
        }
        self.shared = {copy for copy in _staged_copies(plan, rank) if copy.is_local}
        self.kept = sum(copy.nbytes for copy in self.shared)
        self._slot_bytes = {owner: largest(chunks) for owner, chunks in self._chunks.items()}
        self._slots = {
            owner: min(len(chunks), _SLOTS, bucket_bytes // self._slot_bytes[owner]) if chunks else 0
            for owner, chunks in self._chunks.items()
        }
        self.nbytes = self._slots[rank] * self._slot_bytes[rank]
        self.rounds = max(len(chunks) for chunks in self._chunks.values())
        self.received = 0
        self._fills: list[BoxTable] = []
        self._readers: list[set[int]] = []
        self._drains: dict[int, list[BoxTable]] = {}

    def compile(
        self,
        ring: Region | None,
        rings: Mapping[int, MappedRegion],
        local: Source,
        ledger: Ledger | None,
        fused: Collection[str],
    ) -> None:
        """Box tables for the rings' addresses.

        Args:
            rings: those of the peers that have one.
            fused: parameters of which local copies also sum the trainer's side.
        """
        for k, chunk in enumerate(self._chunks[self._rank]):
            assert ring is not None
            table = TableBuilder(ledger, self._device)
            for item in chunk.items:
                first, kept = item.copies[0], any(copy.is_local for copy in item.copies)
                place = ring.data_address + self._slot(self._rank, k) + item.offset
                table.pack(first, local, place, count_source=kept and first.param in fused)
            self._fills.append(table.build(Stores.CACHED))
            self._readers.append({copy.target_rank for item in chunk.items for copy in item.copies})
        # A rank's own ring comes first: what it has just filled is still in its nearest cache.
        mine = {self._rank: ring} if ring is not None and self.shared else {}
        for owner, mapped in (mine | dict(rings)).items():
            for k, chunk in enumerate(self._chunks[owner]):
                table = TableBuilder(ledger, self._device)
                for item in chunk.items:
                    for copy in item.copies:
                        if copy.target_rank == self._rank:
                            table.unpack(copy, mapped.data_address + self._slot(owner, k) + item.offset)
                self._drains.setdefault(owner, []).append(table.build(Stores.STREAMED))
        self.received = sum(table.nbytes for tables in self._drains.values() for table in tables) - self.kept

    def _slot(self, owner: int, k: int) -> int:
        return k % self._slots[owner] * self._slot_bytes[owner]

    def aim(self, live: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> None:
        for table in self._fills:
            table.aim({}, local)
        for tables in self._drains.values():
            for table in tables:
                table.aim(live)

    def run(
        self,
        generation: int,
        own: ControlPage,
        pages: Mapping[int, ControlPage],
        waiter: Waiter,
        sums: Sums,
    ) -> None:
        """Fill and drain all chunks of one generation.

        Raises:
            PeerLostError: a rank that this one waits for died, gave up or did not answer in time.
        """
        pages = {**pages, self._rank: own}
        filled = 0
        drained = dict.fromkeys(self._drains, 0)

        def can_fill() -> bool:
            if filled == len(self._fills):
                return False
            previous = filled - self._slots[self._rank]
            return previous < 0 or not any(lagging(reader, previous) for reader in self._readers[previous])

        def lagging(reader: int, chunk: int) -> bool:
            return own.get("drained", reader) < chunk_mark(generation, chunk)

        def can_drain(owner: int) -> bool:
            at = drained[owner]
            return at < len(self._drains[owner]) and pages[owner].get("filled") >= chunk_mark(generation, at)

        while True:
            moved = False
            if can_fill():
                self._fills[filled].run(sums)
                self._fills[filled].finish()
                own.set("filled", chunk_mark(generation, filled))
                filled += 1
                moved = True
            for owner, tables in self._drains.items():
                if can_drain(owner):
                    at = drained[owner]
                    tables[at].run(sums)
                    tables[at].finish()
                    pages[owner].set("drained", chunk_mark(generation, at), self._rank)
                    drained[owner] = at + 1
                    moved = True
            if moved:
                continue
            # Nothing to do but wait: for owners that have yet to fill, or for readers of the slot that comes next.
            owners = {owner for owner, tables in self._drains.items() if drained[owner] < len(tables)}
            if filled == len(self._fills) and not owners:
                return
            readers: set[int] = set()
            if filled < len(self._fills):
                previous = filled - self._slots[self._rank]
                readers = {reader for reader in self._readers[previous] if lagging(reader, previous)}
            # A reader may have caught up since can_fill() was asked: then nobody is waited for, and it is asked again.
            waiter.until(
                lambda: can_fill() or any(can_drain(owner) for owner in self._drains),
                ranks=(owners | readers) - {self._rank},
                generation=generation,
                what="cast or read a staged chunk",
            )


def _staged_copies(plan: ReshardPlan, owner: int) -> list[Copy]:
    """What others read from ``owner`` with a cast, and what its own engine needs of the same."""
    sends = [copy for copy in plan.sends(owner) if needs_cast(copy)]
    sent = {reading(copy) for copy in sends}
    return sends + [copy for copy in plan.copies(owner) if copy.is_local and reading(copy) in sent]
