"""The inference engine's layout, learnt by running its own weight loader on index-valued tensors.

No table per architecture: whatever the engine's ``load_weights`` does with a checkpoint (fusing q, k and v,
replicating KV heads, stacking experts, padding the vocabulary, tying embeddings) is seen element by element
and turned into boxes. Every tensor-parallel rank bakes itself. The engine's weights are not touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from hybridengine.sync.plan.boxes import Box, counts
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.sync.plan.trace import IndexTensor, Recorder, Write


class _Loads(Protocol):
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> object: ...


def bake_vllm(
    model: _Loads,
    params: Mapping[str, ParamSpec],
    live: Mapping[str, torch.Tensor],
    *,
    optional: Mapping[str, torch.Tensor] | None = None,
) -> tuple[TensorSlice, ...]:
    """Which box of which canonical parameter each element of this rank's engine tensors holds.

    Args:
        model: the engine's model object; ``model.load_weights((name, tensor) pairs)`` loads a checkpoint.
        params: the canonical parameters, as the checkpoint (and the training engine) names them.
        live: the engine's tensors by name, as :class:`TensorSlice.tensor` should call them; the model's
            parameters must be these tensors or views of the same storages.
        optional: further tensors (buffers), which the loader may fill or leave alone.

    Elements that the loader fills with a constant are padding (vocabulary rows) and stay out of the map.
    Parameters that the loader leaves to other ranks (expert parallelism) have no slices here.

    Raises:
        ValueError: an engine element that no parameter reaches, or two do; a loader that computes on
            weights or refuses a parameter. The message names the tensor or parameter.
    """
    memory = _Memory({**live, **(optional or {})})
    dtype, device = next(((t.dtype, t.device) for t in live.values()), (torch.float32, torch.device("cpu")))
    feeding = "nothing"

    def checkpoint() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal feeding
        for name, spec in params.items():
            feeding = name
            yield name, IndexTensor.of(name, spec.shape, dtype, device)

    recorder = Recorder(memory.holds)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(checkpoint())
    except (AssertionError, AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(f"the engine's loader failed at {feeding}: {type(error).__name__}: {error}") from error
    slices = [piece for write in recorder.writes if write.source is not None for piece in _slices(write, memory)]
    memory.check_complete(recorder.writes, set(optional or ()))
    return tuple(slices)


class _Memory:
    """Resolves views of engine memory to (live tensor, element offset)."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self.live = live
        self._by_storage: dict[int, list[str]] = {}
        for name, tensor in live.items():
            self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)

    def holds(self, view: torch.Tensor) -> bool:
        return self._find(view) is not None

    def locate(self, view: torch.Tensor) -> tuple[str, int]:
        found = self._find(view)
        assert found is not None
        return found, int(view.storage_offset()) - int(self.live[found].storage_offset())

    def _find(self, view: torch.Tensor) -> str | None:
        for name in self._by_storage.get(view.untyped_storage()._cdata, ()):
            tensor = self.live[name]
            first = view.storage_offset() - tensor.storage_offset()
            if first >= 0 and first + _extent(view) <= _extent(tensor):
                return name
        return None

    def check_complete(self, writes: Sequence[Write], optional: Collection[str] = ()) -> None:
        """Every element of every live tensor is written exactly once; of ``optional`` ones, or nothing of it."""
        written: dict[str, list[tuple[Box, str]]] = {name: [] for name in self.live}
        for write in writes:
            if write.destination.numel():
                name, start = self.locate(write.destination)
                what = "padding" if write.source is None else write.source.param
                written[name].append((_local_box(self.live[name], write.destination, start, name), what))
        written = {name: boxes for name, boxes in written.items() if boxes or name not in optional}
        unreached = [name for name, boxes in written.items() if not boxes and self.live[name].numel()]
        if unreached:
            raise ValueError(
                f"no checkpoint parameter is loaded into the engine tensors {unreached[:10]} ({len(unreached)} in all)"
            )
        for name, boxes in written.items():
            if not self.live[name].numel():
                continue
            grid = counts(tuple(self.live[name].shape), [box for box, _ in boxes])
            sources = ", ".join(sorted({what for _, what in boxes}))
            if grid.min() == 0:
                raise ValueError(f"part of the engine tensor {name} {list(self.live[name].shape)} is not reached by "
                                 f"any checkpoint parameter (loaded into it: {sources})")  # fmt: skip
            if grid.max() > 1:
                raise ValueError(f"part of the engine tensor {name} is loaded more than once, from {sources}")


def _extent(tensor: torch.Tensor) -> int:
    """Elements between the first and one past the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _local_box(tensor: torch.Tensor, view: torch.Tensor, start: int, name: str) -> Box:
    """A view of ``tensor`` that selects and narrows, as a box in the tensor's own coordinates."""
    offsets, sizes = [0] * tensor.dim(), [1] * tensor.dim()
    steps = {dim: int(tensor.stride(dim)) for dim in range(tensor.dim()) if tensor.shape[dim] > 1}
    for dim in sorted(steps, key=lambda d: -steps[d]):
        offsets[dim], start = divmod(start, steps[dim])
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size > 1:
            same = [dim for dim in steps if steps[dim] == stride]
            if not same:
                raise ValueError(f"the loader writes to the engine tensor {name} through a view that is not a box")
            sizes[same[0]] = size
    return tuple(offsets), tuple(sizes)


def _slices(write: Write, memory: _Memory) -> list[TensorSlice]:
    """The boxes of one recorded copy.

    Each canonical dimension must vary along at most one dimension of the destination; its indices there
    are cut into runs of consecutive numbers, and every combination of runs is a box.
    """
    source, destination = write.source, write.destination
    assert source is not None
    if not destination.numel():
        return []
    tensor, start = memory.locate(destination)
    runs: list[list[tuple[int, int, int]]] = []  # per canonical dimension: (canonical start, length, position)
    steps: list[int] = []
    varied: set[int] = set()
    for k, index in enumerate(source.coordinates[1:]):
        axis, values = _axis(index.expand(destination.shape), source.param, tensor)
        if axis is not None:
            if axis in varied:
                raise ValueError(f"{source.param}: the loader folds two of its dimensions into one of {tensor}")
            varied.add(axis)
            steps.append(destination.stride(axis))
        else:
            steps.append(destination.stride(k) if destination.dim() == len(source.coordinates) - 1 else 0)
        runs.append(_runs(values))
    if any(size > 1 and axis not in varied for axis, size in enumerate(destination.shape)):
        raise ValueError(f"{source.param}: the loader repeats it inside the engine tensor {tensor}")
    return [
        TensorSlice(
            source.param,
            tuple(first for first, _, _ in combination),
            tuple(length for _, length, _ in combination),
            tensor,
            start + sum(position * step for (_, _, position), step in zip(combination, steps, strict=True)),
            tuple(steps),
        )
        for combination in itertools.product(*runs)
    ]


def _axis(index: torch.Tensor, param: str, tensor: str) -> tuple[int | None, torch.Tensor]:
    """The one dimension along which ``index`` varies (None when constant), and its values along it."""
    for dim in range(index.dim()):
        if index.stride(dim) == 0 or index.shape[dim] == 1:
            index = index.narrow(dim, 0, 1)
    varies = [
        dim for dim in range(index.dim()) if index.shape[dim] > 1 and not bool((index == index.narrow(dim, 0, 1)).all())
    ]
    if len(varies) > 1:
        raise ValueError(f"{param}: the loader scatters it over {tensor} in a way that is not a set of boxes")
    for dim in range(index.dim()):
        if dim not in varies:
            index = index.narrow(dim, 0, 1)
    return (varies[0] if varies else None), index.reshape(-1)


def _runs(values: torch.Tensor) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers, as (first value, length, position).

    >>> _runs(torch.tensor([4, 5, 6, 0, 1]))
    [(4, 3, 0), (0, 2, 3)]
    """
    breaks = (torch.nonzero(values[1:] != values[:-1] + 1).flatten() + 1).tolist()
    edges = [0, *breaks, values.numel()]
    return [(int(values[low]), high - low, low) for low, high in zip(edges, edges[1:], strict=False)]
