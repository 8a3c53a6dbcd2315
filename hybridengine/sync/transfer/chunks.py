"""Cutting copies into chunks that fit a staging bucket. Pure: sender and reader compute the same cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridengine.sync.plan.plan import Copy
from hybridengine.sync.transfer.region import ALIGNMENT


class Item(NamedTuple):
    """One dense box in a chunk: where it starts (bytes), how it is read, and every copy that it serves."""

    offset: int
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return self.copies[0].nbytes


class Chunk(NamedTuple):
    """Items at aligned offsets; ``nbytes`` up to the end of the last one, rounded up to the alignment."""

    items: tuple[Item, ...]
    nbytes: int


def split(copy: Copy, limit: int) -> list[Copy]:
    """Cut a copy along its slowest dimensions into parts of at most ``limit`` bytes.

    Example: 10 float32 rows of 3 with a limit of 48 bytes become 4 + 4 + 2 rows.
    """
    if copy.nbytes <= limit:
        return [copy]
    sizes = copy.box.sizes
    # Cut the first dimension that still has more than one element in it.
    dim = next(d for d, size in enumerate(sizes) if size > 1)
    inner = copy.nbytes // sizes[dim]
    step = max(1, limit // inner)
    parts = [
        copy._replace(box=copy.box.narrow(dim, start, min(step, sizes[dim] - start)))
        for start in range(0, sizes[dim], step)
    ]
    return [small for part in parts for small in split(part, limit)]


def cut(copies: Sequence[Copy], limit: int, *, share: bool) -> list[Chunk]:
    """Pack copies, in order, into chunks of at most ``limit`` bytes; no item straddles two chunks.

    Args:
        share: copies that read the same elements become one item that serves several readers.

    Raises:
        ValueError: the limit does not even hold one aligned element.
    """
    if limit < ALIGNMENT:
        raise ValueError(f"a staging chunk needs at least {ALIGNMENT} bytes, not {limit}")
    limit -= limit % ALIGNMENT
    groups: dict[object, list[Copy]] = {}
    for copy in copies:
        for part in split(copy, limit):
            groups.setdefault(reading(part) if share else len(groups), []).append(part)
    chunks: list[Chunk] = []
    items: list[Item] = []
    used = 0
    for group in groups.values():
        nbytes = _aligned(group[0].nbytes)
        if items and used + nbytes > limit:
            chunks.append(Chunk(tuple(items), used))
            items, used = [], 0
        items.append(Item(used, tuple(group)))
        used += nbytes
    if items:
        chunks.append(Chunk(tuple(items), used))
    return chunks


def reading(copy: Copy) -> tuple[object, ...]:
    """What a copy reads, and as what: copies of one owner that are equal in this can be served together."""
    box = copy.box
    return copy.param, copy.source, box.sizes, box.source_start, box.source_strides, copy.target_dtype


def needs_cast(copy: Copy) -> bool:
    return copy.source_dtype != copy.target_dtype


def largest(chunks: Sequence[Chunk]) -> int:
    return max((chunk.nbytes for chunk in chunks), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
