"""Joining strided copies: fewer boxes, the same elements."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.strided import Strided, coalesce, simplify
from tests.unit.sync.plan.oracle import walk


def elements(box: Strided) -> list[tuple[int, int, int]]:
    """(source, target, index) addresses of every element, sorted."""
    walks = [
        walk(start, box.sizes, strides)
        for start, strides in (
            (box.source_start, box.source_strides),
            (box.target_start, box.target_strides),
            (box.index_start, box.index_strides),
        )
    ]
    return sorted(zip(*(w.tolist() for w in walks), strict=True))


def test_a_contiguous_block_is_one_run() -> None:
    assert simplify(Strided((2, 1, 3), 6, (3, 3, 1), 0, (3, 3, 1), 6, (3, 3, 1))).sizes == (6,)


def test_single_elements_become_a_run() -> None:
    assert coalesce(Strided((), i, (), i, (), i, ()) for i in range(5)) == [Strided((5,), 0, (1,), 0, (1,), 0, (1,))]


def test_interleaved_groups_become_one_box() -> None:
    """q rows of three KV groups, 4 rows each, lie 6 rows apart on one side and back to back on the other."""
    boxes = [Strided((4, 5), g * 30, (5, 1), g * 20, (5, 1), g * 20, (5, 1)) for g in range(3)]
    (box,) = coalesce(boxes)
    assert box.sizes == (3, 20) and box.source_strides == (30, 1) and box.target_strides == (20, 1)


def test_uneven_neighbours_become_one_box() -> None:
    boxes = [
        Strided((rows, 2), 2 * at, (2, 1), 2 * at, (2, 1), 2 * at, (2, 1)) for rows, at in ((3, 0), (3, 3), (1, 6))
    ]
    assert coalesce(boxes) == [Strided((14,), 0, (1,), 0, (1,), 0, (1,))]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_coalescing_keeps_every_element(data: st.DataObject) -> None:
    """Cut one strided box at random and put it together again: same elements, never more boxes."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    inner = contiguous_strides(sizes)
    stretch = data.draw(st.integers(1, 3))
    whole = Strided(sizes, 3, tuple(s * stretch for s in inner), 0, inner, 7, inner)
    pieces = [whole]
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(pieces) - 1))
        dim = data.draw(st.integers(0, len(sizes) - 1))
        box = pieces[at]
        if box.sizes[dim] > 1:
            cut = data.draw(st.integers(1, box.sizes[dim] - 1))
            pieces[at : at + 1] = [box.narrow(dim, 0, cut), box.narrow(dim, cut, box.sizes[dim] - cut)]
    joined = coalesce(pieces)
    assert sorted(e for box in joined for e in elements(box)) == elements(whole)
    assert len(joined) <= len(pieces)
    assert sum(prod(box.sizes) for box in joined) == prod(sizes)
