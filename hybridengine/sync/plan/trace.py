"""Tensors whose elements are their own indices, to watch where a loader puts each element.

An IndexTensor stands for a canonical parameter. It carries, per canonical dimension, an integer tensor of
indices that is a stride-0 view of one row of numbers: a 10 GB weight costs a few hundred kilobytes, and
nothing depends on how many integers the engine's dtype can represent. Whatever re-layouts the loader
applies (narrow, transpose, chunk, cat, ...) are applied to the indices; when it finally copies into an
engine tensor the copy is noted down and *not* carried out, so the engine's weights keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class IndexTensor(torch.Tensor):
    """A parameter made of indices, each with this tensor's shape.

    ``coordinates[0]`` is all zeros (it keeps the shape of scalars); ``coordinates[1 + k]`` is the canonical index in
    dimension k.
    """

    param: str
    coordinates: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(
        cls,
        param: str,
        coordinates: Sequence[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> IndexTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.param, made.coordinates = param, tuple(coordinates)
        return made

    @classmethod
    def of(cls, param: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> IndexTensor:
        """The whole parameter: element (i, j) carries the numbers i and j."""
        return cls(param, coordinates_of(tuple(shape)), shape, dtype, device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"IndexTensor({self.param}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"{func} reached an IndexTensor outside of a Recorder")


@lru_cache(maxsize=256)
def coordinates_of(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The coordinate tensors of a whole parameter; layers repeat shapes, so they are shared."""
    found = [torch.zeros((), dtype=torch.int64).expand(shape)]
    for dim, size in enumerate(shape):
        row = torch.arange(size, dtype=torch.int64)
        found.append(row.view([size if d == dim else 1 for d in range(len(shape))]).expand(shape))
    return tuple(found)


@dataclass(slots=True)
class Write:
    """The loader wrote to ``destination`` (a view of engine memory) from a parameter, or filled it with a constant."""

    destination: torch.Tensor
    source: IndexTensor | None


#: Operations that only move elements; the same call on the indices says where each element went.
LAYOUT_OPS = {
    aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.select.int, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.expand.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.cat.default, aten.stack.default, aten.index_select.default, aten.index.Tensor, aten.flip.default,
    aten.narrow.default, aten.repeat.default, aten.unfold.default,
}  # fmt: skip
VIEW_OPS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}
COPY_OPS = {aten.clone.default, aten._to_copy.default, aten.lift_fresh.default, aten.contiguous.default}


class Recorder(TorchDispatchMode):
    """Inside of it, copies of IndexTensors and constant fills of engine memory are recorded, not executed.

    Args:
        is_engine_memory: tells whether a tensor is (a view of) a live engine tensor.
    """

    def __init__(self, is_engine_memory: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self._is_engine_memory = is_engine_memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        traced = _traced((*args, *kwargs.values()))
        if not traced:
            if func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default) and self._is_engine_memory(args[0]):
                self.writes.append(Write(args[0], None))
                return args[0]
            return func(*args, **kwargs)
        if func is aten.copy_.default and not isinstance(args[0], IndexTensor):
            destination, source = args[0], args[1]
            if not self._is_engine_memory(destination):
                raise ValueError(f"{source.param}: the loader stages it in a buffer of its own; that can't be traced")
            source.coordinates[0].expand(destination.shape)  # raises, as the copy itself would, where shapes differ
            self.writes.append(Write(destination, source))
            return destination
        first = traced[0]
        if any(other.param != first.param for other in traced):
            names = ", ".join(sorted({other.param for other in traced}))
            raise ValueError(f"the loader combines several parameters before it stores them: {names}")
        if func in COPY_OPS:
            return IndexTensor(
                first.param, first.coordinates, first.shape, kwargs.get("dtype") or first.dtype,
                torch.device(kwargs.get("device") or first.device),
            )  # fmt: skip
        if func in VIEW_OPS:
            return _like(first, [index.reshape(args[1]) for index in first.coordinates])
        if func not in LAYOUT_OPS:
            raise ValueError(f"{first.param}: the loader computes with the weight ({func}) instead of only moving it")
        results = [
            func(*_pick(args, k), **{key: _pick(value, k) for key, value in kwargs.items()})
            for k in range(len(first.coordinates))
        ]
        if isinstance(results[0], torch.Tensor):
            return _like(first, results)
        return [_like(first, parts) for parts in zip(*results, strict=True)]


def _traced(arguments: Sequence[Any]) -> list[IndexTensor]:
    """The IndexTensors among an operation's arguments, lists of tensors included."""
    found: list[IndexTensor] = []
    for argument in arguments:
        if isinstance(argument, IndexTensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += _traced(argument)
    return found


def _pick(argument: Any, k: int) -> Any:
    """The argument with every IndexTensor replaced by its k-th coordinate tensor."""
    if isinstance(argument, IndexTensor):
        return argument.coordinates[k]
    if isinstance(argument, (list, tuple)):
        return type(argument)(_pick(item, k) for item in argument)
    return argument


def _like(tensor: IndexTensor, indices: Sequence[torch.Tensor]) -> IndexTensor:
    return IndexTensor(tensor.param, indices, indices[0].shape, tensor.dtype, tensor.device)
