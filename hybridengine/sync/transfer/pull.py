"""Pull: every rank reads the slices it lacks straight from its peers' mapped memory into live engine weights.

The default on one node. Steps of one sync, the same on every rank (a rank is both writer and reader):

    publish(generation)                    my shards are final
    copy my own slices                     and sum what others read of my shards, for the proof
    for each peer: wait(generation), copy  one native call per peer, all its slices at once
    staged chunks                          what peers can't read where it is: through a ring of the owner's
    post my sums; done; wait for all       now the trainer may change its weights again
    add up everybody's sums and compare    on every rank, from shared memory

Nothing is sent per parameter, nothing is opened or mapped after setup, no collective runs unless something
failed, and without staging bytes go from the peer's shard to the engine's weight in one pass. Posted sums stay valid
until their readers publish the next generation, which they do after reading.

On a GPU all of it is enqueued and ordered by words in host memory that streams write and wait for
(``device_pipeline.py``); where training weights leave the device between syncs, every slice is staged, as memory that
peers map can't leave.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.distributed.errors import PeerLostError, agree, raise_together
from hybridengine.distributed.links import PeerLinks, node_identity
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.transfer.alias import find_aliases
from hybridengine.sync.transfer.base import LayoutChangedError, SyncReport, TensorSink, TensorSource, TransferSettings
from hybridengine.sync.transfer.chunks import reading
from hybridengine.sync.transfer.control import ControlPage, Waiter
from hybridengine.sync.transfer.device_pipeline import DeviceMoves
from hybridengine.sync.transfer.host_pipeline import HostMoves
from hybridengine.sync.transfer.region import MappedRegion, Region
from hybridengine.sync.transfer.regions import map_region, region_type
from hybridengine.sync.transfer.staging import StagedChunks
from hybridengine.sync.transfer.tables import BoxTable, TableBuilder, TensorWatch, check_copies, device_of
from hybridengine.sync.transfer.verify import Verifier

#: What a rank exports, by role: the control page with the posted sums, the staging ring, the training shards.
BOARD, RING, SHARDS = "board", "ring", "shards"


class PullTransfer:
    """See the module's text. Setup is collective: it moves the training shards into shared memory.

    Args:
        train: offers ``local_tensors()`` (and ``memory_holders()`` where shards have further views).
        rollout: offers ``live_tensors()`` (and ``alias_tensor`` where it can run on foreign memory).
        plan: plan over the ranks of ``settings.group``.

    Raises:
        ValueError: on every rank: the engines' tensors do not fit the plan, or ranks are on several nodes.
    """

    method = "pull"

    def __init__(self, train: TensorSource, rollout: TensorSink, plan: ReshardPlan, settings: TransferSettings) -> None:
        self._train, self._rollout, self._plan, self._settings = train, rollout, plan, settings
        self._group = settings.group
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._generation = 0
        self._proven = not settings.verify  # the addresses, by one sync whose result was read back
        cores: list[int] = [os.cpu_count() or 1] * self._size
        if self._size > 1:
            dist.all_gather_object(cores, cores[0], group=self._group)
        self._cores = min(cores)
        with agree("setting up the weight transfer", self._group):
            self._check()
            self._export()
        self._connect()
        with agree("planning the weight transfer", self._group):
            self._compile()

    # -- setup -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._plan.world_size != self._size:
            raise ValueError(f"the plan is for {self._plan.world_size} ranks, the group has {self._size}")
        self._live = dict(self._rollout.live_tensors())
        local = self._train.local_tensors()
        check_copies(self._plan, self._rank, local, self._live)

    def _export(self) -> None:
        """Make this rank's regions. Shards that leave between syncs stay private: what peers need of them is staged."""
        local, holders = self._train.local_tensors(), self._train.memory_holders()
        self._device = device_of(local or self._live)
        private = platform.of(self._device).separate_memory and self._settings.weights_leave
        self._regions: dict[str, Region] = {}
        if self._size > 1:
            words = 2 * len(self._plan.target.params)  # of which a parameter aliased everywhere uses none
            # Two boards in turn: a rank may post for the next generation while a slower one still reads this one's.
            self._regions[BOARD] = Region.allocate(2 * 8 * max(1, words), readers=self._size)
        self._shards_fixed = self._size > 1 and not private
        if self._shards_fixed:
            shards = region_type(self._device).adopt(
                local, readers=self._size, holders=holders, directory=self._settings.weights_dir
            )
            local = self._train.local_tensors()
            shards.check(local)
            self._regions[SHARDS] = shards
        self._local = dict(local)
        self._alias()
        self._local_watch = TensorWatch("training", self._local, self._local, fixed=self._shards_fixed)
        self._live_watch = TensorWatch("rollout", self._live, self._live, fixed=False)
        self._staged = StagedChunks(
            self._plan, self._rank, self._size, self._settings.bucket_bytes, self._device, cores=self._cores,
            everything=self._size > 1 and private,
        )  # fmt: skip
        self.extra_bytes = self._staged.nbytes
        if self.extra_bytes:
            self._regions[RING] = region_type(self._device).ring(self.extra_bytes, self._device, readers=self._size)

    def _alias(self) -> None:
        """Offer the engine the trainer's memory wherever it already holds the right bytes in the right order."""
        # Weights that leave during a rollout can't be what it runs on.
        found = {} if self._settings.weights_leave else find_aliases(self._plan, self._rank, self._live)
        self._aliases = {
            target: alias
            for target, alias in found.items()
            if self._rollout.alias_tensor(target, alias.view(self._local, self._live))
        }
        self._live = dict(self._rollout.live_tensors())
        copies = self._plan.copies(self._rank)
        self.bytes_aliased = sum(copy.nbytes for copy in copies if copy.target in self._aliases)
        self.holds_shards = self._shards_fixed or self.bytes_aliased > 0
        self._moving = {copy.param for copy in copies if copy.target not in self._aliases}

    def _connect(self) -> None:
        """Map every peer's memory, once."""
        self._mapped: dict[int, dict[str, MappedRegion]] = {}
        infos = {role: region.info for role, region in self._regions.items()}
        everyone: list[Any] = [(node_identity(), infos, None)]
        if self._size > 1:
            # Only names that are aliased here matter to the others; most engines alias nothing.
            moving = self._moving if self._aliases else None
            everyone = [None] * self._size
            dist.all_gather_object(everyone, (node_identity(), infos, moving), group=self._group)
            elsewhere = [rank for rank, (node, *_) in enumerate(everyone) if node != everyone[0][0]]
            for *_, moving in everyone:
                self._moving |= set(self._plan.target.params) if moving is None else moving
            if elsewhere:
                raise ValueError(
                    f"sync.method=pull maps memory between ranks of one node, but ranks {elsewhere} are not on "
                    "rank 0's node: use sync.method=collective"
                )
        self.peers = PeerLinks.connect(
            [region.fd for region in self._regions.values()],
            group=self._group,
            timeout_seconds=self._settings.timeout_seconds,
        )
        with agree("mapping the peers' weights", self._group):
            for rank, fds in self.peers.fds.items():
                roles = everyone[rank][1]
                self._mapped[rank] = {
                    role: map_region(fd, roles[role]) for fd, role in zip(fds, roles, strict=True)
                }  # fmt: skip
        self._pages = {rank: regions[BOARD].control for rank, regions in self._mapped.items()}
        self._waiter = Waiter(self._pages, self.peers.alive, self._settings.timeout_seconds)

    def _compile(self) -> None:
        """Box tables: one for the rank's own slices, one per peer, one per ring."""
        copies = self._plan.copies(self._rank)
        # Parameters that are the trainer's own memory on every rank have nothing to compare.
        skip = frozenset(self._plan.target.params) - self._moving
        self._verifier = Verifier(
            self._plan.source, self._plan.target, self._rank, self._settings, self._device, skip=skip
        )
        covered = self._verifier.covered(self._plan, self._staged.stages)
        fused = self._verifier.fusable(self._plan) - covered
        ledger = self._verifier.ledger
        own = TableBuilder(ledger, self._device)
        # What several tensors of the engine are copied from is counted once; what is staged, as it is staged.
        counted: set[object] = {reading(copy) for copy in self._plan.sends(self._rank) if self._staged.stages(copy)}
        for copy in copies:
            if not copy.is_local or copy in self._staged.shared:
                continue
            count = copy.param in fused or (copy.param in covered and reading(copy) not in counted)
            counted.add(reading(copy))
            add = own.reread if copy.target in self._aliases else own.copy
            add(copy, self._local, count_source=count)
        self._verifier.add_source(own, self._local, fused, covered)
        self._own = own.build()
        pulls: dict[int, BoxTable] = {}
        for step in range(1, self._size):  # every rank starts with another peer
            rank = (self._rank + step) % self._size
            table = TableBuilder(ledger, self._device)
            for copy in copies:
                if copy.source_rank == rank and not self._staged.stages(copy):
                    table.copy(copy, self._mapped[rank][SHARDS].tensor_address)
            pulls[rank] = table.build()
        pages: dict[int, ControlPage] = dict(self._pages)
        if self._regions:
            pages[self._rank] = self._regions[BOARD].control
        regions: dict[int, Mapping[str, Region | MappedRegion]] = {self._rank: self._regions, **self._mapped}
        rings = {rank: found[RING] for rank, found in regions.items() if RING in found}
        self._staged.compile(rings, pages, self._local, ledger, fused=fused, covered=covered)
        self._pulls = pulls
        shards = {rank: found[SHARDS] for rank, found in self._mapped.items() if SHARDS in found}
        kind = DeviceMoves if platform.of(self._device).separate_memory else HostMoves
        self._moves = kind(self._own, pulls, self._staged.lanes, self._waiter, pages, shards, rank=self._rank,
                           device=self._device)  # fmt: skip
        self._minimum = self._plan.minimum_bytes(self._rank)
        self.bytes_received = self._staged.received + sum(table.nbytes for table in self._pulls.values())

    # -- one sync ----------------------------------------------------------------------------------------------

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version`` (collective).

        Raises:
            WeightSyncError, PeerError: on every rank; the engine holds no complete version then.
        """
        begin = time.perf_counter()
        self._generation += 1
        self._waiter.seconds = 0.0
        self._verifier.begin()
        error: Exception | None = None
        generation, sums = self._generation, self._verifier.sums
        try:
            live = self._aim()
            self._moves.run(generation, version, sums)
            if not self._proven:
                self._verifier.read_source(self._local)
                self._verifier.read_target(live)
        except Exception as caught:  # noqa: BLE001  raised below, after the ranks have agreed
            error = caught
        self._conclude(error, f"weight sync to policy version {version}")
        full_check, self._proven = not self._proven, True
        return SyncReport(
            method=self.method,
            version=version,
            bytes_received=self.bytes_received,
            bytes_minimum=self._minimum,
            bytes_local=self._own.nbytes + self._staged.kept,
            bytes_aliased=self.bytes_aliased,
            extra_bytes=self.extra_bytes,
            rounds=max(1, self._staged.rounds),
            seconds=time.perf_counter() - begin,
            wait_seconds=self._waiter.seconds,
            fingerprint_seconds=self._verifier.seconds,
            full_check=full_check,
        )

    def _aim(self) -> dict[str, torch.Tensor]:
        """Look where all tensors are now; refuse when one is not what was planned."""
        local = self._train.local_tensors()
        self._local_watch.check(local)
        live = self._rollout.live_tensors()
        self._live_watch.check(live)
        for target, alias in self._aliases.items():
            view = alias.view(self._local, live)
            if live[target].data_ptr() != view.data_ptr() and not self._rollout.alias_tensor(target, view):
                raise LayoutChangedError(f"rollout tensor {target} no longer runs on the trainer's memory")
        moved = None if self._shards_fixed else local
        self._own.aim(live, moved)
        for table in self._pulls.values():
            table.aim(live)
        self._staged.aim(live, moved)
        self._local = dict(local)
        return live

    def _conclude(self, error: Exception | None, what: str) -> None:
        """Wait until all ranks are through, after which shards may change, and judge the sync as all others do.

        A peer that died is reported here, on every survivor, rather than in a collective that cannot complete.
        """
        sums = self._verifier.total()
        failed = error is not None
        if self._regions:
            control = self._regions[BOARD].control
            self._board(self._regions[BOARD], len(sums))[:] = sums
            if failed:
                control.abort(self._generation)
            control.set("done", self._generation)
            try:
                self._waiter.all_done(self._generation)
            except PeerLostError as lost:
                control.abort(self._generation)
                if isinstance(error, PeerLostError):
                    raise error from None  # says where it got stuck
                raise lost from error
            self._moves.rest()
            # Everybody has written its verdict before its "done", so all ranks see the same ones. A faster rank may
            # have given up the generation after this one by now: not this one's business.
            failed = failed or any(page.get("aborted") == self._generation for page in self._pages.values())
        if failed:
            raise_together(error, what, self._group)
            raise AssertionError("a rank gave up without an error")
        total = sums.copy()
        for mapped in self._mapped.values():
            total += self._board(mapped[BOARD], len(sums))
        self._verifier.compare(total, what)

    def _board(self, region: Region | MappedRegion, words: int) -> np.ndarray:
        """The sums that a rank has posted in this generation; writable for this rank's own region."""
        begin = self._generation % 2 * 8 * words
        return region.bytes()[begin : begin + 8 * words].view(np.uint64)

    def invalidate(self) -> None:
        """The engine's memory is another than before: read it back after the next sync."""
        self._proven = not self._settings.verify

    def close(self) -> None:
        """Close links and descriptors; the mappings end with their last tensors."""
        self._moves.close()
        for region in self._regions.values():
            region.close()
        for mapped in self._mapped.values():
            for peer in mapped.values():
                peer.close()
        self.peers.close()
