"""Fingerprints: additive over any cut, and different after every kind of damage a sync could do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.distributed.world import World
from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.chunks import reading
from hybridengine.sync.transfer.fingerprint import Ledger
from hybridengine.sync.transfer.verify import Verifier
from tests.distributed.layouts import SHAPES, Holder, layout, only, shard, tensor_parallel
from tests.fingerprints import MASK, tensor_fingerprint


def test_worked_example() -> None:
    """32-bit words 3, 5: R(0) * (3 * P(0) + 5 * P(1)), from published values of both mixes, made odd."""
    words = torch.tensor([3, 5], dtype=torch.int32)
    assert tensor_fingerprint(words) == 0xE220A8397B1DCDAF * (3 * 0x514E28B7 + 5 * 0x30F4C307) & MASK


@given(cut=st.integers(1, 39), dim=st.integers(0, 1), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_additive_over_shards(cut: int, dim: int, seed: int) -> None:
    whole = torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))
    steps = whole.stride()
    parts = tensor_fingerprint(whole.narrow(dim, 0, cut), index_strides=steps) + tensor_fingerprint(
        whole.narrow(dim, cut, 40 - cut), index=cut * steps[dim], index_strides=steps
    )
    assert parts & MASK == tensor_fingerprint(whole)


def test_transposed_memory_has_the_same_fingerprint() -> None:
    whole = torch.randn(6, 10)
    assert tensor_fingerprint(whole.t().contiguous().t()) == tensor_fingerprint(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_single_bit_flip_shows(dtype: torch.dtype) -> None:
    words = torch.randn(37).to(dtype)
    before = tensor_fingerprint(words)
    bits = words.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for place in range(37):
        for bit in range(8 * dtype.itemsize):
            flip = torch.tensor(-(2 ** (8 * dtype.itemsize - 1)) if bit == 8 * dtype.itemsize - 1 else 2**bit)
            bits[place] ^= flip.to(bits.dtype)
            assert tensor_fingerprint(words) != before, (place, bit)
            bits[place] ^= flip.to(bits.dtype)


def damage_swap_elements(t: torch.Tensor) -> None:
    t.view(-1)[[0, -1]] = t.view(-1)[[-1, 0]]


def damage_swap_halves(t: torch.Tensor) -> None:
    t.copy_(t.roll(len(t) // 2, 0))


def damage_transpose(t: torch.Tensor) -> None:
    t.copy_(t.t().clone())


def damage_shift(t: torch.Tensor) -> None:
    t.view(-1)[1:] = t.view(-1)[:-1].clone()


def damage_sign_of_zero(t: torch.Tensor) -> None:
    t[1, 1] = -0.0


@pytest.mark.parametrize(
    "damage",
    [damage_swap_elements, damage_swap_halves, damage_transpose, damage_shift, damage_sign_of_zero],
    ids=lambda f: f.__name__.removeprefix("damage_"),
)
def test_permutations_show(damage) -> None:
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    weights[1, 1] = 0.0
    before = tensor_fingerprint(weights)
    damage(weights)
    assert tensor_fingerprint(weights) != before


def words_of(count: int) -> torch.Tensor:
    return torch.randint(0, 2**15, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int16)


@pytest.mark.parametrize("shape", [(8, 64), (8, 1024), (6, 3000)], ids=str)
def test_exchange_of_rows_with_equal_sums_shows(shape: tuple[int, int]) -> None:
    """Every pair of rows, each a permutation of the same words: sum of word * (a * i + b) is blind to it."""
    words = words_of(shape[1])
    rows = torch.stack([words.roll(7 * i) for i in range(shape[0])])
    before = tensor_fingerprint(rows)
    for i in range(shape[0]):
        for j in range(i):
            order = list(range(shape[0]))
            order[i], order[j] = j, i
            assert tensor_fingerprint(rows[order].contiguous()) != before, (i, j)


@pytest.mark.parametrize("distance", [1, 2, 1024, 5000])
def test_second_differences_show(distance: int) -> None:
    """+1, -2, +1 on equally distant words: blind, too, wherever the weight is linear in the index."""
    words = words_of(20_000)
    before = tensor_fingerprint(words)
    for place in range(0, 20_000 - 2 * distance, 997):
        damaged = words.clone()
        damaged[place : place + 2 * distance + 1 : distance] += torch.tensor([1, -2, 1], dtype=torch.int16)
        assert tensor_fingerprint(damaged) != before, place


def test_every_pair_of_bit_flips_shows() -> None:
    """Of six words at the begin of one run and of the next."""
    words = torch.zeros(2060, dtype=torch.int16)
    before = tensor_fingerprint(words)
    places = [*range(6), *range(2048, 2054)]
    flips = [(place, bit) for place in places for bit in range(15)]
    for i, (one, bit) in enumerate(flips):
        for other, second in flips[:i]:
            damaged = words.numpy().copy()
            damaged[one] ^= 1 << bit
            damaged[other] ^= 1 << second
            assert tensor_fingerprint(torch.from_numpy(damaged)) != before, (one, bit, other, second)


def both_sides(a_map, b_map, *, spoil=None) -> list[str]:
    """Sum every rank's reads of both layouts as the ranks would, and compare."""
    size = a_map.world_size
    total = None
    for rank in range(size):
        ledger = Ledger(a_map, b_map, rank)
        sums = np.zeros(ledger.size, np.uint64)
        a, b = Holder(a_map, rank, fill=3), Holder(b_map, rank, fill=3)
        if spoil:
            spoil(rank, a, b)
        for read in ledger.source_reads(set()):
            add(sums, ledger.source_slot(read.param), read, a)
        for read in ledger.target_reads():
            add(sums, ledger.target_slot(read.param), read, b)
        total = sums if total is None else total + sums
    return ledger.mismatches(total)


def add(sums: np.ndarray, slot: int, read, holder: Holder) -> None:
    memory = holder.tensors[read.tensor]
    view = memory.as_strided(read.sizes, read.strides, read.start)
    sums[slot : slot + 1] += np.uint64(tensor_fingerprint(view, index=read.index, index_strides=read.index_strides))


def uneven(shape, rank, size):
    """Rank 0 holds everything, rank 1 the first row again: elements differ in how many hold them."""
    if rank > 1:
        return None
    return ((0,) * len(shape), shape if rank == 0 else (1, *shape[1:]))


LAYOUTS = {
    "rows": shard(0),
    "cols": shard(1),
    "tp2": tensor_parallel(2, 0),
    "replicated": tensor_parallel(1, 0),
    "one-rank": only({2}),
    "uneven-holders": uneven,
}


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_layouts_compare_whatever_their_holders(source: str, target: str) -> None:
    """m_A and m_B holders per element; also where elements of one parameter differ in that."""
    a, b = layout(LAYOUTS[source], 4, "float32"), layout(LAYOUTS[target], 4, "float32")
    assert both_sides(a, b) == []

    def spoil(rank: int, a: Holder, b: Holder) -> None:
        if "proj" in b.tensors and rank == min(2, 1 if target == "uneven-holders" else 2):
            b.tensors["proj"].view(-1)[0] += 1

    assert both_sides(a, b, spoil=spoil) == ["proj"]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_local_copies_and_the_other_reads_sum_each_element_of_a_shard_once(source: str, target: str) -> None:
    a, b = layout(LAYOUTS[source], 4, "float32"), layout(LAYOUTS[target], 4, "float32")
    plan = build_plan(a, b)
    for rank in range(4):
        ledger = Ledger(a, b, rank)
        local = [copy for copy in plan.copies(rank) if copy.is_local]
        elements = {name: sum(c.box.numel for c in local if c.param == name) for name in SHAPES}
        fused = ledger.fusable(elements)
        even = {name for name in SHAPES if a.multiplicity(name) and b.multiplicity(name)}
        assert fused == {name for name in even if elements[name]}
        read = {name: [] for name in SHAPES}
        for copy in local:
            if copy.param in fused:
                read[copy.param] += indices(copy.box.sizes, copy.box.index_start, copy.box.index_strides)
        for item in ledger.source_reads(fused):
            read[item.param] += indices(item.sizes, item.index, item.index_strides)
        held = {piece.param: piece for piece in a.ranks[rank]}
        for name in even:
            piece, steps = held.get(name), contiguous_strides(SHAPES[name])
            start = sum(o * s for o, s in zip(piece.offsets, steps, strict=True)) if piece else 0
            assert sorted(read[name]) == (sorted(indices(piece.sizes, start, steps)) if piece else []), (rank, name)


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_is_cast_for_others_is_not_read_again_for_the_proof(source: str, target: str) -> None:
    a, b = layout(LAYOUTS[source], 4, "float32"), layout(LAYOUTS[target], 4, "bfloat16")
    plan = build_plan(a, b)
    for rank in range(4):
        verifier = Verifier(a, b, rank, TransferSettings(world=World()), torch.device("cpu"))
        covered = verifier.covered(plan)
        held = {piece.param: piece for piece in a.ranks[rank]}
        assert covered == {name for name in held if a.multiplicity(name) == 1 and b.multiplicity(name)}
        assert not {read.param for read in verifier.ledger.source_reads((), covered)} & covered
        mine = [copy for copy in plan.copies(rank) if copy.is_local]
        for name in covered:
            distinct = {reading(copy): copy for copy in (*mine, *plan.sends(rank)) if copy.param == name}.values()
            read = [i for c in distinct for i in indices(c.box.sizes, c.box.index_start, c.box.index_strides)]
            piece, steps = held[name], contiguous_strides(SHAPES[name])
            start = sum(o * s for o, s in zip(piece.offsets, steps, strict=True))
            assert sorted(read) == sorted(indices(piece.sizes, start, steps)), (rank, name)


def indices(sizes, start: int, strides) -> list[int]:
    """Canonical indices that a walk over a box reads."""
    return [start + sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*sizes)]


def test_one_stale_replica_shows_and_is_named() -> None:
    a, b = layout(shard(0), 4, "float32"), layout(tensor_parallel(2, 0), 4, "float32")

    def stale(rank: int, a: Holder, b: Holder) -> None:
        if rank == 3:
            b.write(2)

    assert both_sides(a, b, spoil=stale) == sorted(SHAPES)


def test_skipped_parameters_are_left_out() -> None:
    a = layout(shard(0), 2, "float32")
    ledger = Ledger(a, a, 0, skip=["proj"])
    assert ledger.source_slot("proj") == ledger.target_slot("proj") == -1
    assert "proj" not in {read.param for read in ledger.target_reads()} and ledger.size == 2 * (len(SHAPES) - 1)
