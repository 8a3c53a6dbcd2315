"""Baking with small loaders of our own: every way to move elements is followed, every other one is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from hybridengine.sync.plan.bake import bake_vllm
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.plan.merge import RankLayout, merge_layouts
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice

Loader = Callable[[nn.Parameter, Tensor], None]


class Toy(nn.Module):
    """One engine tensor ``t`` of ``shape`` that ``loader(t, checkpoint tensor)`` fills."""

    def __init__(self, loader: Loader, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self._loader(self.t, weight)


def bake(loader: Loader, shape: tuple[int, ...], *checkpoint: tuple[int, ...]) -> tuple[TensorSlice, ...]:
    model = Toy(loader, *shape)
    params = {name: ParamSpec(name, size, "float32") for name, size in zip("abc", checkpoint, strict=False)}
    slices = bake_vllm(model, params, {"t": model.t})
    assert bool((model.t == 7).all()), "baking must not write to the engine"
    return slices


def replay(loader: Loader, shape: tuple[int, ...], checkpoint: tuple[int, ...]) -> None:
    """The map says the same as really loading numbers."""
    slices = bake(loader, shape, checkpoint)
    numbers = torch.arange(1, 1 + int(torch.Size(checkpoint).numel()), dtype=torch.float64).reshape(checkpoint)
    real = Toy(loader, *shape, dtype=torch.float64)
    with torch.no_grad():
        real.load_weights([("a", numbers)])
    copied = torch.zeros_like(real.t)
    for item in slices:
        box = tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))
        torch.as_strided(copied, item.sizes, item.strides, item.start).copy_(numbers[box])
    assert torch.equal(copied, real.t)


def interleave(t: nn.Parameter, w: Tensor) -> None:
    """Rows 0, 2, 4 before rows 1, 3, 5."""
    t.data.copy_(torch.cat([w[::2], w[1::2]]))


def reorder_columns(t: nn.Parameter, w: Tensor) -> None:
    t.data.copy_(w.index_select(1, torch.tensor([2, 3, 0, 1])))


LOADERS: dict[str, tuple[Loader, tuple[int, ...], tuple[int, ...]]] = {
    "copy": (lambda t, w: t.data.copy_(w), (6, 4), (6, 4)),
    "narrow": (lambda t, w: t.data.copy_(w.narrow(1, 4, 4)), (6, 4), (6, 8)),
    "slice-assignment": (lambda t, w: t.data.__setitem__(slice(None), w[2:8]), (6, 4), (9, 4)),
    "transpose": (lambda t, w: t.data.copy_(w.t()), (6, 4), (4, 6)),
    "transpose-contiguous-cast": (lambda t, w: t.data.copy_(w.t().contiguous().to(t.dtype)), (6, 4), (4, 6)),
    "chunk": (lambda t, w: t.data.copy_(w.chunk(3)[1]), (2, 4), (6, 4)),
    "unbind": (lambda t, w: [d.copy_(s) for d, s in zip(t.data, w.unbind(0), strict=True)], (3, 2, 4), (3, 2, 4)),
    "cat": (interleave, (6, 4), (6, 4)),
    "columns-reordered": (reorder_columns, (6, 4), (6, 4)),
    "unsqueeze": (lambda t, w: t.data.copy_(w.unsqueeze(0)), (1, 6, 4), (6, 4)),
    "expert-of-a-stack": (lambda t, w: [t.data[e].copy_(w[e]) for e in range(2)], (2, 6, 4), (2, 6, 4)),
    "scalar": (lambda t, w: t.data.copy_(w.view(t.shape)), (1,), ()),
    "vector": (lambda t, w: t.data.copy_(w[3:]), (5,), (8,)),
    "split-rows": (lambda t, w: t.data.copy_(w.view(2, 3, 4)[:, 0]), (2, 4), (6, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_layouts_are_followed(name: str) -> None:
    loader, shape, checkpoint = LOADERS[name]
    replay(loader, shape, checkpoint)


def test_padding_stays_out_of_the_map() -> None:
    """What the loader fills with zeros is padding: the engine keeps it, no parameter is there."""

    def loader(t: nn.Parameter, w: Tensor) -> None:
        t.data[:5].copy_(w)
        t.data[5:].fill_(0)

    (item,) = bake(loader, (8, 2), (5, 2))
    assert item == TensorSlice("a", (0, 0), (5, 2), "t", 0, (2, 1))


def test_two_parameters_in_one_tensor() -> None:
    where = iter((slice(0, 4), slice(4, 6)))
    q, k = bake(lambda t, w: t.data[next(where)].copy_(w), (6, 3), (4, 3), (2, 3))
    assert (q.param, q.start, k.param, k.start) == ("a", 0, "b", 12)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda t, w: t.data.copy_(w + 1), "a: the loader computes with the weight .*add"),
        (lambda t, w: t.data.copy_(w * 2.0), "a: the loader computes with the weight .*mul"),
        (lambda t, w: t.data.copy_(w[:1].expand(6, 4)), "a: the loader repeats it inside the engine tensor t"),
        (lambda t, w: t.data[:5].copy_(w[:5]), "part of the engine tensor t .* not reached .* \\(loaded into it: a\\)"),
        (lambda t, w: [t.data.copy_(w), t.data[:1].copy_(w[:1])], "engine tensor t is loaded more than once, from a"),
        (lambda t, w: torch.zeros(6, 4).copy_(w), "a: the loader stages it in a buffer of its own"),
        (lambda t, w: t.data.copy_(w[:5]), "loader failed at a"),
        (lambda t, w: None, "no checkpoint parameter is loaded into the engine tensors \\['t'\\]"),
    ],
    ids=["adds", "scales", "broadcasts", "leaves-a-row", "writes-twice", "stages", "wrong-shape", "ignores"],
)
def test_loaders_that_are_refused(loader: Loader, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        bake(loader, (6, 4), (6, 4))


def test_ranks_are_merged_by_name() -> None:
    """Rank 0 keeps w in two tensors, rank 1 in one of another name, rank 2 nothing."""
    params = {"w": ParamSpec("w", (4,), "float32")}
    ranks = [
        [TensorSlice("w", (0,), (2,), "x", 0, (1,)), TensorSlice("w", (2,), (2,), "y", 5, (1,))],
        [TensorSlice("w", (0,), (4,), "z", 0, (1,))],
        [],
    ]
    layouts = [RankLayout.of(slices, dict.fromkeys("xyz", "bfloat16")) for slices in ranks]
    merged = merge_layouts(params, layouts)
    assert [list(slices) for slices in merged.ranks] == ranks and merged.dtype == {"w": "bfloat16"}


def test_parameters_that_are_held_nowhere_or_in_part() -> None:
    params = {name: ParamSpec(name, (4,), "float32") for name in ("w", "lost")}
    half = TensorSlice("w", (0,), (2,), "w", 0, (1,))
    with pytest.raises(ValueError, match="nowhere: \\['lost'\\]"):
        gather_shard_map([half], params, {"w": "float32"})
    with pytest.raises(ValueError, match="w: part of the \\(4,\\) parameter is held by no rank"):
        gather_shard_map([half], {"w": params["w"]}, {"w": "float32"})
