"""Fingerprints: proof that the weights an engine runs on are the weights the trainer has.

For a canonical parameter in the rollout dtype, its bytes in row-major order seen as 32-bit words (two bfloat16, one
float32),

    F = sum_g word_g * W(g)  mod 2**64
    W(g) = R(g // 1024) * P(g % 1024)         R: 64-bit mix of the run of 1024 words, P: 32-bit mix of the place in it

The sum is additive over any cut into boxes, so every rank sums what it holds and one all-reduce of 8 bytes
per parameter and side compares two whole layouts without gathering either. Because the weight of a word
depends on its *canonical* index, elements that arrive in the wrong place change the sum.

What a sync proves. Let A be the training layout and B the rollout layout, and let every element have m_A
holders in A and m_B in B. Then  sum_ranks F(B_r) * m_A == sum_ranks F(A_r) * m_B.

* The A side is always read from the trainer's own memory, by the rank that owns it.
* The B side is, in the first sync of a plan, read back from the engine's live memory through the rollout
  layout alone, independently of the plan's addresses: it proves addresses, strides and coverage.
* In later syncs it is taken from the words in flight, as they are stored: it proves that what was read from
  other ranks is what they hold *now* (stale, torn or swapped reads, a peer's memory gone, flipped bits on the
  way). That a store instruction reached the address that the first sync proved right is not proven again.
* In later syncs, too, what a rank copies from its own shard into its own engine is read once, for both sides. For that
  part the comparison proves that *other* replicas agree, not that this copy is right; the first sync does. The same
  goes for what it casts for others (and itself): it proves that they have what was cast, not that the shard stood
  still meanwhile. What others read from a shard directly, the owner reads for itself.

What is caught for certain: any change of a single word; two words of one run exchanged; flips of two bits in one run;
all because the weights are odd, and those of places differ. Everything else is caught unless the weights of this very
error happen to cancel: about 1 in 2**32 where few words of one run of 1024 differ by little, about 1 in 2**64 where the
error spreads over several runs. Not caught, as by any fixed linear sum: an error vector computed from the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from hybridengine.sync.plan.boxes import Box, Ints, contiguous_strides, counts, intersect, subtract_all, volume
from hybridengine.sync.plan.spec import Piece, ShardMap


@dataclass(frozen=True, slots=True)
class Read:
    """A box of a local tensor to sum: memory walk, canonical index walk, and the parameter it belongs to."""

    param: str
    tensor: str
    sizes: Ints
    start: int
    strides: Ints
    index: int
    index_strides: Ints


def piece_read(param: str, shape: Ints, piece: Piece, tensor: str, box: Box | None = None) -> Read:
    """How to sum ``piece`` (or the part of it inside ``box``) of a parameter of ``shape``."""
    offsets, sizes = piece.box if box is None else box
    steps = contiguous_strides(shape)
    start = piece.start + sum(
        (at - origin) * stride for at, origin, stride in zip(offsets, piece.offsets, piece.strides, strict=True)
    )
    index = sum(at * step for at, step in zip(offsets, steps, strict=True))
    return Read(param, tensor, sizes, start, piece.strides, index, steps)


class Ledger:
    """Both sides of the comparison for one pair of layouts, seen from one rank. Pure integers.

    Slots of the sums: ``target_slot(param)`` for what the engine holds, ``source_slot(param)`` for what the
    trainer holds; ``size`` in total.

    Args:
        skip: parameters left out, because the engine runs on the trainer's own memory everywhere.
    """

    def __init__(self, source: ShardMap, target: ShardMap, rank: int, *, skip: Iterable[str] = ()) -> None:
        self._source, self._target, self._rank = source, target, rank
        skipped = set(skip)
        self.params = [name for name in sorted(target.params) if name not in skipped]
        self._place = {name: i for i, name in enumerate(self.params)}
        self.size = 2 * len(self.params)
        # (m_A, m_B), or (1, 1) for a parameter whose elements differ in holders: see source_reads.
        held = [self._multiplicities(name) or (1, 1) for name in self.params]
        self._factors = np.array(held, np.uint64).reshape(-1, 2).T

    def target_slot(self, param: str) -> int:
        """-1 for a skipped parameter."""
        return self._place.get(param, -1)

    def source_slot(self, param: str) -> int:
        place = self._place.get(param, -1)
        return place if place < 0 else place + len(self.params)

    def fusable(self, local_elements: dict[str, int]) -> set[str]:
        """Parameters whose local copies read each element that this rank both trains and serves exactly once.

        Args:
            local_elements: number of elements per parameter that the plan copies from this rank to itself.
        """
        common: dict[tuple[int, int], int] = {}
        found = set()
        for name in self.params:
            source, target = self._source.holdings[name].pattern, self._target.holdings[name].pattern
            if self._multiplicities(name) is None or not local_elements.get(name):
                continue
            key = id(source), id(target)
            if key not in common:
                own, served = ([piece.box for piece in p.ranks[self._rank]] for p in (source, target))
                parts = [part for a in own for b in served if (part := intersect(a, b))]
                once = all(int(counts(source.shape, boxes).max()) <= 1 for boxes in (own, served))
                common[key] = sum(map(volume, parts)) if once else 0
            if common[key] == local_elements[name]:
                found.add(name)
        return found

    def covered(self, elements: dict[str, int]) -> set[str]:
        """Parameters of which this rank reads each element of its shard exactly once for itself or others.

        Where one rank alone holds an element, whoever serves it has it from there. So all reads of a shard, its own and
        those for others, are at least the whole shard; as many elements as that in distinct reads are every one once.

        Args:
            elements: number of elements per parameter in *all* distinct reads of this rank's shards.
        """
        volumes: dict[int, int] = {}
        found = set()
        for name, count in elements.items():
            held, pattern = self._multiplicities(name), self._source.holdings[name].pattern
            if held is None or held[0] != 1 or name not in self._place:
                continue
            if id(pattern) not in volumes:
                volumes[id(pattern)] = sum(volume(piece.box) for piece in pattern.ranks[self._rank])
            if count == volumes[id(pattern)]:
                found.add(name)
        return found

    def source_reads(self, fused: Collection[str], covered: Collection[str] = ()) -> list[Read]:
        """What this rank must sum of its own shards: not ``covered`` parameters, nor what it copies to itself of
        ``fused`` ones.

        Where all elements of a parameter have equally many holders: the shards as they are. Otherwise one
        owner per element sums it once for every holder in the rollout layout, which is exactly what the
        other side adds up to.
        """
        reads = []
        for name in self.params:
            if name in covered:
                continue
            pattern, tensors = self._source.holdings[name]
            if self._multiplicities(name) is not None:
                served = self._target.holdings[name].pattern.ranks[self._rank] if name in fused else ()
                for piece in pattern.ranks[self._rank]:
                    rest = subtract_all(piece.box, (other.box for other in served))
                    reads += [piece_read(name, pattern.shape, piece, tensors[piece.slot], box) for box in rest]
                continue
            targets = [p.box for pieces in self._target.holdings[name].pattern.ranks for p in pieces]
            earlier = [p.box for pieces in pattern.ranks[: self._rank] for p in pieces]
            for piece in pattern.ranks[self._rank]:
                for owned in subtract_all(piece.box, earlier):
                    parts = (intersect(owned, box) for box in targets)
                    reads += [
                        piece_read(name, pattern.shape, piece, tensors[piece.slot], part) for part in parts if part
                    ]
                earlier.append(piece.box)
        return reads

    def target_reads(self) -> list[Read]:
        """The reads of everything that this rank's engine holds, according to the rollout layout."""
        reads = []
        for name in self.params:
            pattern, tensors = self._target.holdings[name]
            reads += [piece_read(name, pattern.shape, p, tensors[p.slot]) for p in pattern.ranks[self._rank]]
        return reads

    def mismatches(self, sums: np.ndarray) -> list[str]:
        """Parameters on which the two sides differ. ``sums``: uint64 [size], added up over all ranks."""
        target, source = sums.reshape(2, -1) * self._factors  # uint64 wraps
        return [self.params[i] for i in np.flatnonzero(target != source)]

    def _multiplicities(self, name: str) -> tuple[int, int] | None:
        held_a, held_b = self._source.multiplicity(name), self._target.multiplicity(name)
        return None if held_a is None or held_b is None else (held_a, held_b)
