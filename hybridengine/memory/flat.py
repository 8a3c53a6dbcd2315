"""Many tensors on one block of memory, which is offloaded in one copy and can use large pages.

A copy costs a few microseconds to start, a page of 4 KiB that is given back and taken again about one: for a model of
hundreds of parameters that is more than moving the bytes takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybridengine import platform
from hybridengine.platform.storages import as_bytes

#: Of each tensor's start within the block.
ALIGNMENT = 512


def zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous zero tensors of the same shapes, dtypes and device, on one storage of their own."""
    if not tensors:
        return []
    sizes = [math.prod(t.shape) * t.element_size() for t in tensors]
    device = tensors[0].device
    block = platform.of(device).block(sum(map(_aligned, sizes)), device).zero_()
    found, start = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        found.append(block[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += _aligned(size)
    return found


def pack(tensors: Iterable[Tensor]) -> bool:
    """Move tensors onto one storage: same tensor objects, same values, same views of each other.

    Every tensor object on their memory must be given, bases of views excepted. One that is forgotten is found by the
    count of references to the old memory, after the move.

    Returns:
        whether anything moved: tensors on one storage already, and memory that is not torch's own (shared with other
        processes), stay.

    Raises:
        RuntimeError: some other tensor still views memory that was moved.
    """
    objects: dict[int, list[Tensor]] = {}
    listed = list(tensors)
    for tensor in (*listed, *(t._base for t in listed if t._base is not None)):
        if tensor.untyped_storage().nbytes():
            same = objects.setdefault(tensor.untyped_storage()._cdata, [])
            if not any(tensor is known for known in same):
                same.append(tensor)
    del listed
    if len(objects) < 2 or not all(held[0].untyped_storage().resizable() for held in objects.values()):
        return False
    olds = [held[0].untyped_storage() for held in objects.values()]
    sizes = [old.nbytes() for old in olds]
    contents = [as_bytes(old) for old in olds]
    device = contents[0].device
    if platform.of(device).separate_memory:
        # By way of host memory: a GPU that is full of a rollout engine need not have room for both.
        for i, old in enumerate(olds):
            contents[i] = contents[i].to("cpu", copy=True)
            old.resize_(0)
    block = platform.of(device).block(sum(map(_aligned, sizes)), device)
    storage, start = block.untyped_storage(), 0
    del olds
    for held, size in zip(objects.values(), sizes, strict=True):
        old = held[0].untyped_storage()
        block[start : start + size].copy_(contents.pop(0))
        for tensor in held:
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            offset = start // tensor.element_size() + tensor.storage_offset()
            tensor.data = view.set_(storage, offset, tensor.size(), tensor.stride())  # type: ignore[call-overload]
        if (others := torch._C._storage_Use_Count(old._cdata) - 1) > 0:
            raise RuntimeError(f"{others} other tensor(s) still view the memory of one of shape {tuple(held[0].shape)}")
        start += _aligned(size)
    return True


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
