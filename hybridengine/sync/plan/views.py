"""Slices of canonical parameters inside the tensors that an engine holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hybridengine.sync.plan.spec import Piece, TensorSlice


def view_of(tensor: Tensor, item: TensorSlice | Piece) -> Tensor:
    """A slice of a checkpoint's parameter inside its local tensor, in the parameter's own axes."""
    return tensor.detach().as_strided(item.sizes, item.strides, tensor.storage_offset() + item.start)


def write_slices(full: Tensor, pieces: Iterable[TensorSlice], tensors: Mapping[str, Tensor]) -> None:
    """Copy one parameter, given in full, into the slices of it that ``tensors`` hold, cast to their dtype."""
    for piece in pieces:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
        view_of(tensors[piece.tensor], piece).copy_(full[box])
