"""Storages: the memory behind tensors and their views."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once; without empty ones."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    return sum(storage.nbytes() for storage in distinct(tensors))


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A uint8 tensor over the whole storage, its memory itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class OwnPool:
    """Where one owner's GPU memory is taken when it comes back.

    In torch's common pool it would be cut out of some larger cached block, beside others' memory, and the block could
    not go back to the driver when the owner leaves. A pool that nobody refers to any more is given back.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Grow an emptied storage, in the order of the current stream."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool):
            storage.resize_(nbytes)

    def leave(self) -> None:
        """All of the owner's storages are empty."""
        self._pool = None
