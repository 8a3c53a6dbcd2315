"""Tensors that are stored otherwise than loaded: random rearrangements, element by element against numpy."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridengine.sync.plan import relayout
from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.relayout import compose, rearrangement
from hybridengine.sync.plan.spec import TensorSlice
from tests.unit.sync.plan.oracle import addresses

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """How a loaded tensor is stored, made by the same numpy operations on indices and on values.

    Attributes:
        loaded: shape of the loaded tensor.
        orders: per loaded dimension, the order of its indices.
        pads: per loaded dimension, (before, after) rows of padding.
        dims: order of the dimensions.
        tiled: the two last stored dimensions are cut into tiles of (2, 2), one tile behind the other.
        gap: elements between two rows of the stored tensor that belong to nobody.
    """

    loaded: Shape
    orders: tuple[tuple[int, ...], ...]
    pads: tuple[tuple[int, int], ...]
    dims: Shape
    tiled: bool
    gap: int

    def apply(self, values: np.ndarray) -> np.ndarray:
        for dim, order in enumerate(self.orders):
            values = values.take(order, axis=dim)
        values = np.pad(values, self.pads).transpose(self.dims)
        *outer, rows, columns = values.shape
        if self.tiled and rows % 2 == columns % 2 == 0:
            values = values.reshape(*outer, rows // 2, 2, columns // 2, 2).swapaxes(-3, -2)
            values = values.reshape(*outer, rows, columns)
        return values

    @property
    def coordinates(self) -> list[np.ndarray]:
        """What :func:`rearrangement` is given: 1 + index, 0 for padding."""
        return [self.apply(index + 1) for index in np.indices(self.loaded)]

    @property
    def strides(self) -> Shape:
        shape = self.coordinates[0].shape
        return tuple(s + self.gap * s // shape[-1] if d < len(shape) - 1 else 1
                     for d, s in enumerate(contiguous_strides(shape)))  # fmt: skip

    def memory(self, values: np.ndarray) -> np.ndarray:
        """The stored tensor's memory, 0 where it is padding or nobody's. ``values``: of the loaded one, none is 0."""
        stored = self.apply(values)
        memory = np.zeros(sum((n - 1) * s for n, s in zip(stored.shape, self.strides, strict=True)) + 1, np.int64)
        memory[np.indices(stored.shape).reshape(stored.ndim, -1).T @ np.array(self.strides)] = stored.reshape(-1)
        return memory


@st.composite
def storings(draw: st.DrawFn) -> Stored:
    loaded = draw(st.lists(st.integers(1, 6), min_size=2, max_size=3).map(tuple))
    orders = [order_of(draw, size) for size in loaded]
    pads = [(draw(st.integers(0, 1)), draw(st.integers(0, 2))) for _ in loaded]
    dims = draw(st.permutations(range(len(loaded))))
    return Stored(loaded, tuple(orders), tuple(pads), tuple(dims), draw(st.booleans()), draw(st.integers(0, 3)))


def order_of(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """As it is, in blocks that changed places (halves exchanged, say), or shuffled."""
    kind = draw(st.sampled_from(["same", "blocks", "shuffled"]))
    if kind == "shuffled":
        return tuple(draw(st.permutations(range(size))))
    if kind == "blocks":
        cuts = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size})
        blocks = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        return tuple(i for block in draw(st.permutations(blocks)) for i in block)
    return tuple(range(size))


def written(boxes: Any, values: dict[str, np.ndarray], memory: np.ndarray) -> np.ndarray:
    """Memory of the same size, written as the slices say; no element twice."""
    found = np.zeros_like(memory)
    for box in boxes:
        coordinates, places = addresses(box)
        assert not found[places].any(), "written twice"
        found[places] = values[box.param][tuple(coordinates.T)]
    return found


def numbered(shape: Shape, first: int = 1) -> np.ndarray:
    return np.arange(first, first + prod(shape)).reshape(shape)


@settings(max_examples=300, deadline=None)
@given(storings())
@example(Stored((4, 3), ((2, 3, 0, 1), (0, 1, 2)), ((0, 0), (0, 0)), (0, 1), False, 0))  # halves exchanged
@example(Stored((4, 6), ((0, 1, 2, 3), tuple(range(6))), ((0, 0), (0, 0)), (1, 0), True, 0))  # tiles of a transpose
def test_boxes_say_where_every_element_is_stored(stored: Stored) -> None:
    boxes = rearrangement("w", stored.coordinates, stored.strides)
    memory = stored.memory(numbered(stored.loaded))
    assert np.array_equal(written(boxes, {"w": numbered(stored.loaded)}, memory), memory)


@settings(max_examples=300, deadline=None)
@given(storings(), st.data())
def test_slices_of_the_loaded_tensor_are_found_in_the_stored_one(stored: Stored, data: st.DataObject) -> None:
    """The loaded tensor is cut in two along one dimension: two canonical parameters, the second of them transposed,
    with an offset of its own, and, where a dimension has one index left, without it (an expert of a stack)."""
    dim = data.draw(st.integers(0, len(stored.loaded) - 1), label="dim")
    at = data.draw(st.integers(0, stored.loaded[dim]), label="at")
    strides = contiguous_strides(stored.loaded)
    slices, values = [], {}
    loaded = np.zeros(stored.loaded, np.int64)
    for name, first, last in (("a", 0, at), ("b", at, stored.loaded[dim])):
        if first == last:
            continue
        sizes = tuple(last - first if d == dim else size for d, size in enumerate(stored.loaded))
        dims = list(range(len(sizes)))
        if name == "b":
            dims.reverse()
            if last - first == 1:
                dims.remove(dim)
        offsets = tuple(data.draw(st.integers(0, 2), label="offset") for _ in dims)
        shape = tuple(o + sizes[d] for o, d in zip(offsets, dims, strict=True))
        values[name] = numbered(shape, 1 + 1000 * len(values))
        slices.append(
            TensorSlice(
                name, offsets, tuple(sizes[d] for d in dims), "w", first * strides[dim], tuple(strides[d] for d in dims)
            )
        )
        coordinates, places = addresses(slices[-1])
        loaded.reshape(-1)[places] = values[name][tuple(coordinates.T)]
    assert loaded.all(), "the cut covers the tensor"
    boxes = {"w": rearrangement("w", stored.coordinates, stored.strides)}
    memory = stored.memory(loaded)
    found = compose(slices, boxes, {"w": stored.loaded})
    assert {piece.tensor for piece in found} == {"w"}
    assert np.array_equal(written(found, values, memory), memory)


def test_tensors_that_are_stored_as_loaded_keep_their_slices() -> None:
    piece = TensorSlice("p", (0, 0), (2, 2), "other", 4, (2, 1))
    assert compose([piece], {"w": ()}, {"w": (2, 2)}) == (piece,)


@pytest.mark.parametrize(
    ("coordinates", "boxes"),
    [
        ([[3, 4, 1, 2]], [((2,), (2,), 0), ((0,), (2,), 2)]),
        ([[0, 1, 2, 0, 0]], [((0,), (2,), 1)]),  # one row of padding before, two after
        ([[2, 1]], [((1,), (1,), 0), ((0,), (1,), 1)]),
        ([[0, 0]], []),
    ],
    ids=["halves-exchanged", "padded", "reversed", "padding-only"],
)
def test_boxes_worked_by_hand(coordinates: list[list[int]], boxes: list[tuple[Shape, Shape, int]]) -> None:
    """(offsets in the loaded tensor, sizes, start in the stored one)."""
    found = rearrangement("w", [np.array(a) for a in coordinates], (1,))
    assert [(box.offsets, box.sizes, box.start) for box in found] == boxes


def test_long_runs_stay_whole() -> None:
    """A gate and up projection whose halves changed places is two boxes, however large it is."""
    order = np.concatenate([np.arange(5000, 10_000), np.arange(5000)]) + 1
    rows, columns = np.meshgrid(order, np.arange(64) + 1, indexing="ij")
    found = rearrangement("w", [rows, columns], (64, 1))
    assert [(box.offsets, box.sizes, box.start) for box in found] == [
        ((5000, 0), (5000, 64), 0),
        ((0, 0), (5000, 64), 5000 * 64),
    ]


def test_elements_that_are_stored_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="w: elements of it are stored several times"):
        rearrangement("w", [np.array([[1, 2], [1, 2]])], (2, 1))


def test_an_order_that_no_plan_can_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayout, "MAX_BOXES", 5)
    with pytest.raises(ValueError, match="w is stored in an order that takes more than 5 boxes to describe"):
        rearrangement("w", [np.arange(8, 0, -1)], (1,))
