"""The fingerprint of one tensor, by the box copy that computes it in a sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridengine import native, platform
from hybridengine.sync.plan.boxes import contiguous_strides

MASK = 2**64 - 1


def tensor_fingerprint(tensor: torch.Tensor, *, index: int = 0, index_strides: Sequence[int] | None = None) -> int:
    """F of one tensor, in [0, 2**64).

    Args:
        tensor: any strides, at most four dimensions.
        index: canonical flat index of its first element.
        index_strides: canonical step per dimension; default: the tensor is the whole parameter.
    """
    strides = contiguous_strides(tensor.shape) if index_strides is None else index_strides
    boxes = native.new_boxes(1)
    boxes[0]["src"], boxes[0]["op"], boxes[0]["slot"][0] = tensor.data_ptr(), native.copy_op(*[tensor.dtype] * 2), 0
    boxes[0]["index"] = index
    native.set_dims(boxes[0], tensor.shape, tensor.stride(), (0,) * tensor.dim(), strides)
    if not tensor.numel():
        return 0
    here = platform.of(tensor.device)
    sums = here.new_sums(1, tensor.device)
    here.box_runner(tensor.device, native.Stores.BY_SIZE)(boxes, sums)
    assert sums is not None
    return int(sums[0]) & MASK
