"""Slices of canonical parameters inside the tensors that an engine holds."""

from __future__ import annotations

from torch import Tensor

from hybridengine.sync.plan.spec import Piece, TensorSlice


def view_of(tensor: Tensor, item: TensorSlice | Piece) -> Tensor:
    """A slice of a checkpoint's parameter inside its local tensor, in the parameter's own axes."""
    return tensor.detach().as_strided(item.sizes, item.strides, tensor.storage_offset() + item.start)
