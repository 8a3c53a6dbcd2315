"""ReshardPlan: from two ShardMaps to the copies every rank must make. Pure integers, no communication.

Worked example: ``w`` has shape [8]; two ranks train on halves (A) and rank 1 also serves all of it (B).
Rank 1 then copies 4..7 from itself and reads 0..3 from rank 0:

>>> from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice
>>> w = {"w": ParamSpec("w", (8,), "float32")}
>>> half = [[TensorSlice("w", (0,), (4,), "w", 0, (1,))], [TensorSlice("w", (4,), (4,), "w", 0, (1,))]]
>>> full = [[], [TensorSlice("w", (0,), (8,), "w", 0, (1,))]]
>>> plan = build_plan(ShardMap(w, half, {"w": "float32"}), ShardMap(w, full, {"w": "float32"}))
>>> [(copy.source_rank, copy.box.numel, copy.box.target_start) for copy in plan.copies(1)]
[(0, 4, 0), (1, 4, 4)]
>>> plan.received_bytes(1), plan.minimum_bytes(1)
(16, 16)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from hybridengine.sync.plan.boxes import whole
from hybridengine.sync.plan.pairing import Move, UncoveredError, missing_elements, pair
from hybridengine.sync.plan.spec import ITEMSIZE, Pattern, ShardMap
from hybridengine.sync.plan.strided import Strided

#: Parameters that follow the same patterns take turns over at most this many choices of source.
MAX_TURNS = 16


class Copy(NamedTuple):
    """Read ``box`` from tensor ``source`` of ``source_rank``; write it into tensor ``target`` of ``target_rank``.

    ``source`` is a key of the training engine's ``local_tensors()``, ``target`` a name of the rollout
    engine's live tensors. Where the dtypes differ the source casts, so ``nbytes`` counts target bytes.
    """

    param: str
    source_rank: int
    target_rank: int
    source: str
    target: str
    box: Strided
    source_dtype: str
    target_dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.box.sizes) * ITEMSIZE[self.target_dtype]

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank


class _Group(NamedTuple):
    """Parameters that repeat one pattern pair. ``members[i]`` replays ``turns[i % len(turns)]``."""

    source: Pattern
    target: Pattern
    target_itemsize: int
    members: list[str]
    turns: list[tuple[Move, ...]]


class ReshardPlan:
    """The copies of every rank, kept as one set of moves per group of parameters that are cut alike.

    ``copies(rank)`` and ``sends(rank)`` write a rank's share out with names; they are made once and kept.
    Every process that plans the same two layouts gets the same plan in the same order.
    """

    def __init__(self, source: ShardMap, target: ShardMap, groups: Sequence[_Group]) -> None:
        self.source, self.target = source, target
        self.world_size = target.world_size
        self._groups = tuple(groups)
        self._written: dict[tuple[int, int], tuple[Copy, ...]] = {}

    def copies(self, rank: int) -> tuple[Copy, ...]:
        """What ``rank`` must copy, local copies included, ordered by parameter name."""
        return self._write(rank, 1)

    def sends(self, rank: int) -> tuple[Copy, ...]:
        """What other ranks read from ``rank``, in the same order in which they list it."""
        return tuple(copy for copy in self._write(rank, 0) if copy.target_rank != rank)

    def _write(self, rank: int, side: int) -> tuple[Copy, ...]:
        if (rank, side) not in self._written:
            by_param: dict[str, list[Copy]] = {}
            for group in self._groups:
                turns = [[move for move in turn if move[side] == rank] for turn in group.turns]
                for i, name in enumerate(group.members):
                    sources, targets = self.source.holdings[name].tensors, self.target.holdings[name].tensors
                    kinds = self.source.dtype[name], self.target.dtype[name]
                    by_param[name] = [
                        Copy(name, reads, writes, sources[source], targets[target], box, *kinds)
                        for reads, writes, source, target, box in turns[i % len(turns)]
                    ]
            self._written[rank, side] = tuple(copy for name in sorted(by_param) for copy in by_param[name])
        return self._written[rank, side]

    @cached_property
    def traffic(self) -> np.ndarray:
        """int64 [world, world]: bytes that rank ``target`` copies from rank ``source``, at [source, target]."""
        total = np.zeros((self.world_size, self.world_size), dtype=np.int64)
        for group in self._groups:
            for i, moves in enumerate(group.turns):
                times = len(range(i, len(group.members), len(group.turns))) * group.target_itemsize
                for move in moves:
                    total[move.source_rank, move.target_rank] += prod(move.box.sizes) * times
        return total

    def received_bytes(self, rank: int) -> int:
        """Bytes that come from other ranks."""
        return int(self.traffic[:, rank].sum() - self.traffic[rank, rank])

    def sent_bytes(self, rank: int) -> int:
        """Bytes that other ranks read from this one."""
        return int(self.traffic[rank].sum() - self.traffic[rank, rank])

    def local_bytes(self, rank: int) -> int:
        """Bytes that stay on the rank: copied, or aliased where possible."""
        return int(self.traffic[rank, rank])

    def minimum_bytes(self, rank: int) -> int:
        """``|B_r \\ A_r|`` in target bytes, computed from the layouts alone."""
        return sum(
            missing_elements(group.source.shape, group.source.ranks[rank], [p.box for p in group.target.ranks[rank]])
            * group.target_itemsize
            * len(group.members)
            for group in self._groups
        )

    def gather_bytes(self, rank: int) -> int:
        """Bytes that a gather of every parameter in full would bring to ``rank``, in target dtypes."""
        return sum(
            missing_elements(group.source.shape, group.source.ranks[rank], [whole(group.source.shape)])
            * group.target_itemsize
            * len(group.members)
            for group in self._groups
        )

    def summary(self) -> PlanSummary:
        """The figures of the rank that receives most."""
        ranks = range(self.world_size)
        received = [self.received_bytes(rank) for rank in ranks]
        return PlanSummary(
            num_params=len(self.target.params),
            num_patterns=len(self._groups),
            world_size=self.world_size,
            received=max(received),
            minimum=max(self.minimum_bytes(rank) for rank in ranks),
            sent=max(self.sent_bytes(rank) for rank in ranks),
            local=max(self.local_bytes(rank) for rank in ranks),
            gather=max(self.gather_bytes(rank) for rank in ranks),
        )

    def explain(self) -> str:
        """Two lines for the log: what moves, and what that saves."""
        return self.summary().text()


class PlanSummary(NamedTuple):
    """Bytes are those of the rank with the most of each."""

    num_params: int
    num_patterns: int
    world_size: int
    received: int
    minimum: int
    sent: int
    local: int
    gather: int

    @property
    def saved(self) -> float:
        """Share of a full gather's bytes that is not moved."""
        return 1 - self.received / self.gather if self.gather else 0.0

    def text(self) -> str:
        gb = {name: getattr(self, name) / 1e9 for name in ("received", "minimum", "sent", "local", "gather")}
        return (
            f"reshard plan: {self.num_params} parameters in {self.num_patterns} patterns over {self.world_size} ranks\n"
            f"  per rank at most: receives {gb['received']:.3f} GB (minimum {gb['minimum']:.3f}), "
            f"sends {gb['sent']:.3f}, keeps {gb['local']:.3f}; a full gather receives {gb['gather']:.3f} GB "
            f"({self.saved:.0%} saved)"
        )


def build_plan(source: ShardMap, target: ShardMap, *, node_of: Sequence[int] | None = None) -> ReshardPlan:
    """Plan the copies that turn layout ``source`` (training) into layout ``target`` (rollout).

    Each rank receives exactly the bytes it lacks; what several ranks hold is read from the least loaded
    of them, ranks of the reader's own node first when ``node_of`` says which rank is on which node.

    Raises:
        ValueError: the layouts disagree on parameters, shapes or world size, all disagreements in one
            message; or part of a parameter is held by no training rank.
    """
    check_same_model(source, target)
    members: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for name in sorted(target.holdings):
        itemsize = ITEMSIZE[target.dtype[name]]
        members[id(source.holdings[name].pattern), id(target.holdings[name].pattern), itemsize].append(name)
    groups = []
    for (_, _, itemsize), names in members.items():
        a, b = source.holdings[names[0]].pattern, target.holdings[names[0]].pattern
        loads = [0] * target.world_size
        try:
            first = pair(a, b, loads=loads, node_of=node_of)
            turns = [first.moves]
            for turn in range(1, min(first.choices, len(names), MAX_TURNS)):
                turns.append(pair(a, b, loads=loads, turn=turn, node_of=node_of).moves)
        except UncoveredError as error:
            raise ValueError(f"{names[0]}: {error}") from None
        groups.append(_Group(a, b, itemsize, names, turns))
    return ReshardPlan(source, target, groups)


def check_same_model(source: ShardMap, target: ShardMap) -> None:
    """Raise one ValueError that lists every parameter on which the two layouts disagree."""
    faults = []
    if source.world_size != target.world_size:
        faults.append(f"the training layout has {source.world_size} ranks, the rollout layout {target.world_size}")
    if missing := sorted(target.params.keys() - source.params.keys()):
        faults.append(f"not in the training layout: {_some(missing)}")
    if extra := sorted(source.params.keys() - target.params.keys()):
        faults.append(f"not in the rollout layout: {_some(extra)}")
    shapes = [
        f"{name} ({list(source.params[name].shape)} in training, {list(target.params[name].shape)} in rollout)"
        for name in sorted(source.params.keys() & target.params.keys())
        if source.params[name].shape != target.params[name].shape
    ]
    if shapes:
        faults.append(f"shapes differ: {_some(shapes)}")
    if faults:
        raise ValueError("the layouts are not of the same model: " + "; ".join(faults))


def _some(names: Sequence[str], limit: int = 10) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
