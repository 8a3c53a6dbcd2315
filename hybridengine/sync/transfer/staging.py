"""Staged transfer inside a pull: slices that a peer can't read where they are go through a shared ring of slots.

That is those whose dtype changes, which their owner casts, and on a GPU all of them where the shards leave it between
syncs: memory that peers map can't. The owner cuts what others read from it into chunks and fills the ring's slots in
turn; each reader copies its part of a chunk into live engine tensors and marks it drained; a slot is filled again once
all readers of its chunk have drained it. A rank is owner and reader at once and never waits while it can do either.

What the owner's engine needs of the same goes there as it is cast for the others: the float32 shard is the larger part
of the bytes and is read from memory once for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hybridengine import platform
from hybridengine.native import Stores
from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.transfer.chunks import Chunk, cut, largest, needs_cast, reading
from hybridengine.sync.transfer.control import ControlPage
from hybridengine.sync.transfer.fingerprint import Ledger
from hybridengine.sync.transfer.lanes import Gate, Lane
from hybridengine.sync.transfer.region import MappedRegion, Region
from hybridengine.sync.transfer.tables import Source, TableBuilder

#: On the CPU chunks are so large per core of a rank. From 256 KiB to 1 MiB a sync took equally long.
_CHUNK_BYTES = 512 * 2**10
#: How far an owner may run ahead of its readers.
_SLOTS = 8


class StagedChunks:
    """What one rank fills and drains in every sync. Pure planning until :meth:`compile`.

    Args:
        size: number of ranks.
        cores: of the machine, as all ranks have agreed: chunks must be cut alike.
        everything: whatever a peer reads is staged; False: what is cast.

    Attributes:
        nbytes: size of this rank's ring, at most the bucket.
        rounds: most chunks that any rank fills.
        shared: this rank's local copies that are made while the ring is filled.
        kept: bytes they write per sync.
        received: bytes this rank drains from others per sync, in the rollout dtype (after :meth:`compile`).
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        size: int,
        bucket_bytes: int,
        device: torch.device,
        *,
        cores: int = 1,
        everything: bool = False,
    ) -> None:
        self._rank, self._device, self._everything = rank, device, everything
        limit = bucket_bytes // 2
        if not platform.of(device).separate_memory:
            limit = min(limit, _CHUNK_BYTES * max(1, cores // size))
        self._chunks: dict[int, list[Chunk]] = {
            owner: cut(self._staged_copies(plan, owner), limit, share=True) for owner in range(size)
        }
        self.shared = {copy for copy in self._staged_copies(plan, rank) if copy.is_local}
        self.kept = sum(copy.nbytes for copy in self.shared)
        self._slot_bytes = {owner: largest(chunks) for owner, chunks in self._chunks.items()}
        self._slots = {
            owner: min(len(chunks), _SLOTS, bucket_bytes // self._slot_bytes[owner]) if chunks else 0
            for owner, chunks in self._chunks.items()
        }
        self.nbytes = self._slots[rank] * self._slot_bytes[rank]
        self.rounds = max(len(chunks) for chunks in self._chunks.values())
        self.received = 0
        self.lanes: list[Lane] = []

    def compile(
        self,
        rings: Mapping[int, Region | MappedRegion],
        pages: Mapping[int, ControlPage],
        local: Source,
        ledger: Ledger | None,
        *,
        fused: Collection[str],
        covered: Collection[str],
    ) -> None:
        """Box tables for the rings' addresses, and in which order they run.

        Args:
            rings: of the ranks that have one, this one included.
            pages: every rank's, this one's included.
            fused: parameters of which local copies also sum the trainer's side.
            covered: parameters of which everything that is filled does.
        """
        lanes = []
        for owner, ring in rings.items():
            if owner == self._rank:
                lanes.append(self._compile_fill(ring, pages[owner], local, ledger, fused, covered))
            else:
                lanes.append(self._compile_drain(owner, ring, pages[owner], ledger))
                self.received += lanes[-1].table.nbytes
        self.lanes = lanes

    def stages(self, copy: Copy) -> bool:
        """Whether what a copy reads goes through its owner's ring, where another rank needs it."""
        return self._everything or needs_cast(copy)

    def _staged_copies(self, plan: ReshardPlan, owner: int) -> list[Copy]:
        """What others read from ``owner``'s ring, and what its own engine needs of the same, where that is cast."""
        sends = [copy for copy in plan.sends(owner) if self.stages(copy)]
        sent = {reading(copy) for copy in sends if needs_cast(copy)}
        return sends + [copy for copy in plan.copies(owner) if copy.is_local and reading(copy) in sent]

    def _compile_fill(
        self,
        ring: Region | MappedRegion,
        page: ControlPage,
        local: Source,
        ledger: Ledger | None,
        fused: Collection[str],
        covered: Collection[str],
    ) -> Lane:
        table, bounds, readers = TableBuilder(ledger, self._device), [0], []
        for k, chunk in enumerate(self._chunks[self._rank]):
            for item in chunk.items:
                place = ring.data_address + self._slot(self._rank, k) + item.offset
                first, mine = item.copies[0], [copy for copy in item.copies if copy.is_local]
                count = first.param in covered or (bool(mine) and first.param in fused)
                if mine:
                    table.copy_and_pack(mine[0], local, place, count_source=count)
                else:
                    table.pack(first, local, place, count_source=count)
                for copy in mine[1:]:
                    table.copy(copy, local)
            bounds.append(len(table))
            readers.append({copy.target_rank for item in chunk.items for copy in item.copies} - {self._rank})
        gates = []
        for k in range(len(readers)):
            before = k - self._slots[self._rank]  # the chunk that had this slot
            ranks = readers[before] if before >= 0 else ()
            gates.append(Gate({rank: page.word("drained", rank) for rank in ranks}, before + 1))
        return Lane(table.build(Stores.STREAMED), bounds, gates, page.word("filled"))

    def _compile_drain(self, owner: int, ring: Region | MappedRegion, page: ControlPage, ledger: Ledger | None) -> Lane:
        table, bounds, gates = TableBuilder(ledger, self._device), [0], []
        for k, chunk in enumerate(self._chunks[owner]):
            for item in chunk.items:
                for copy in item.copies:
                    if copy.target_rank == self._rank:
                        table.unpack(copy, ring.data_address + self._slot(owner, k) + item.offset)
            bounds.append(len(table))
            gates.append(Gate({owner: page.word("filled")}, k + 1))
        return Lane(table.build(Stores.STREAMED), bounds, gates, page.word("drained", self._rank))

    def _slot(self, owner: int, k: int) -> int:
        return k % self._slots[owner] * self._slot_bytes[owner]

    def aim(self, live: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor] | None) -> None:
        """Find the engine's tensors and, where they may have moved, the shards that the ring is filled from."""
        for lane in self.lanes:
            lane.table.aim(live, local)
