"""Between a checkpoint's parameters and the tensors that transformers keeps them in (stacked experts, other names)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.layouts import Part, StoredTensor


class StoredSource:
    """A checkpoint read by the model's own tensor names.

    Args:
        stored: the model's tensors and the canonical parameters inside each.
    """

    def __init__(self, source: SafetensorsSource, stored: Sequence[StoredTensor]) -> None:
        self._source, self._stored = source, {tensor.name: tensor for tensor in stored}

    @property
    def path(self) -> Path:
        return self._source.path

    def __contains__(self, name: str) -> bool:
        return name in self._stored and all(part.param in self._source for part in self._stored[name].parts)

    def __getitem__(self, name: str) -> Tensor:
        """Raises ValueError for a parameter of another shape than its place."""
        tensor = self._stored[name]
        if len(tensor.parts) == 1:
            return self._source[tensor.parts[0].param]
        full = torch.empty(tensor.shape, dtype=torch.float32)
        for part in tensor.parts:
            piece = self._source[part.param]
            place = view_of(full, part, tuple(piece.shape))
            place.copy_(piece)
        return full

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._stored[name].parts[0].param)


def unstack(tensor: StoredTensor, full: Tensor, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The canonical parameters inside a stored tensor, as views. ``shapes``: of the canonical parameters."""
    for part in tensor.parts:
        yield part.param, view_of(full, part, shapes[part.param])


def view_of(full: Tensor, part: Part, shape: tuple[int, ...]) -> Tensor:
    """The canonical parameter ``part`` of ``shape`` inside its stored tensor.

    Raises:
        ValueError: it does not fit there.
    """
    start = sum(place * stride for place, stride in zip(part.origin, full.stride(), strict=True))
    room = [full.shape[axis] - part.origin[axis] for axis in part.axes]
    if len(shape) != len(part.axes) or any(size > most for size, most in zip(shape, room, strict=True)):
        raise ValueError(f"{part.param} of shape {tuple(shape)} does not fit into {tuple(full.shape)} at {part.origin}")
    return full.as_strided(shape, [full.stride(axis) for axis in part.axes], full.storage_offset() + start)
