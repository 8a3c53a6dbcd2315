"""Copies packed into staging buckets of bounded size, and exchange rounds for collectives. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from hybridengine.reshard.plan import Copy, ReshardPlan
from hybridengine.reshard.spec import ITEMSIZE
from hybridengine.reshard.strided import Strided, simplify

#: Every entry starts at a multiple of this many bytes, so that any dtype may follow any other.
ALIGNMENT = 16
#: A copy is not cut to fill the rest of a bucket when the head would be smaller than this many bytes.
SMALLEST_HEAD = 64 * 1024


class Entry(NamedTuple):
    """A copy, or a part of one, whose elements lie row-major at byte ``offset`` of the bucket in target dtype."""

    copy: Copy
    offset: int


class Bucket(NamedTuple):
    entries: tuple[Entry, ...]
    nbytes: int


class Round(NamedTuple):
    """One all-to-all step of one rank: what it sends to and receives from each peer. Peers without data are absent."""

    sends: dict[int, Bucket]
    receives: dict[int, Bucket]


def pack(copies: Iterable[Copy], capacity: int) -> list[Bucket]:
    """Fill buckets of at most ``capacity`` bytes in order; a copy that does not fit is cut into boxes that do.

    Example: bf16[3] then float32[5] in a bucket lie at offsets 0 and 16, 36 bytes in all.

    Raises:
        ValueError: a capacity below one aligned element.
    """
    if capacity < ALIGNMENT:
        raise ValueError(f"a bucket of {capacity} bytes is smaller than one entry ({ALIGNMENT} bytes)")
    buckets: list[Bucket] = []
    entries: list[Entry] = []
    used = 0

    def close() -> None:
        nonlocal used
        if entries:
            buckets.append(Bucket(tuple(entries), used))
        entries.clear()
        used = 0

    for copy in copies:
        itemsize = ITEMSIZE[copy.target_dtype]
        pending = [copy.box]
        while pending:
            box = pending.pop()
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            room = (capacity - offset) // itemsize
            numel = prod(box.sizes)
            if numel <= room:
                entries.append(Entry(copy._replace(box=box), offset))
                used = offset + numel * itemsize
                continue
            head, rest = _cut(box, room, atomic=bool(entries))
            if head is None or (entries and prod(head.sizes) * itemsize < SMALLEST_HEAD):
                close()
                pending.append(box)
            else:
                pending += [*reversed(rest), head]
    close()
    return buckets


def _cut(box: Strided, room: int, *, atomic: bool) -> tuple[Strided | None, list[Strided]]:
    """Rows of the outermost dimension that fit into ``room`` elements, and what is left.

    ``atomic``: give up (None) rather than go below whole rows, because an emptier bucket will come.
    """
    inner = prod(box.sizes[1:])
    rows = room // inner
    if rows == 0:
        if atomic:
            return None, []
        rows = 1
    head, rest = box.narrow(0, 0, rows), []
    if rows < box.sizes[0]:
        rest = [simplify(box.narrow(0, rows, box.sizes[0] - rows))]
    return simplify(head), rest


def exchange_rounds(plan: ReshardPlan, rank: int, capacity: int) -> list[Round]:
    """What ``rank`` sends and receives, step by step, staging at most ``capacity`` bytes each way per step.

    Each pair of ranks gets the same share of the bucket everywhere, so both ends cut alike. Ranks may need
    different numbers of rounds: agree on the largest (a one-integer all-reduce) and add empty ones.
    """
    traffic = plan.traffic.copy()
    for r in range(plan.world_size):
        traffic[r, r] = 0
    busiest = max(1, int((traffic > 0).sum(axis=0).max()), int((traffic > 0).sum(axis=1).max()))
    share = capacity // busiest // ALIGNMENT * ALIGNMENT
    if share < ALIGNMENT:
        raise ValueError(f"a bucket of {capacity} bytes can't be shared by {busiest} peers; make it larger")
    sends = _by_peer(plan.sends(rank), 2, share)
    receives = _by_peer((copy for copy in plan.copies(rank) if not copy.is_local), 1, share)
    count = max((len(buckets) for buckets in [*sends.values(), *receives.values()]), default=0)
    return [
        Round(
            {peer: buckets[i] for peer, buckets in sends.items() if i < len(buckets)},
            {peer: buckets[i] for peer, buckets in receives.items() if i < len(buckets)},
        )
        for i in range(count)
    ]


def _by_peer(copies: Iterable[Copy], field: int, share: int) -> dict[int, list[Bucket]]:
    streams: dict[int, list[Copy]] = {}
    for copy in copies:
        streams.setdefault(copy[field], []).append(copy)  # type: ignore[arg-type]
    return {peer: pack(stream, share) for peer, stream in sorted(streams.items())}
