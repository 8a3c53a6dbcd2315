"""Sleep for plain tensors: memory back to the operating system and taken again, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

#: glibc maps blocks above this afresh, hence zeroed; smaller ones may come back with old contents.
_MMAP_THRESHOLD = 32 * 2**20


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class Sleeper:
    """Gives a set of tensors' memory back to the operating system and takes it again, in place.

    The tensor objects and every view of them stay valid: only their storage shrinks to nothing and grows.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self.storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self.awake = True

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.storages)

    def sleep(self) -> None:
        if self.awake:
            for storage, _ in self.storages:
                storage.resize_(0)
            _return_freed_memory()
            self.awake = False

    def wake(self) -> None:
        """Memory is back, contents are zero."""
        if not self.awake:
            for storage, size in self.storages:
                storage.resize_(size)
                if size <= _MMAP_THRESHOLD or storage.device.type != "cpu":
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()  # type: ignore[call-overload]
            self.awake = True


def _return_freed_memory() -> None:
    """Hand free pages back to the operating system.

    Freeing alone does not: glibc raises its mmap threshold with every large block that is freed, and keeps
    what is below (most weights) in its heap, where no other process can have it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
