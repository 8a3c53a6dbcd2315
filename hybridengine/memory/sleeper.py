"""Release the memory of plain tensors to the system and take it back, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from hybridengine import platform


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


class Sleeper:
    """Gives a set of tensors' memory back to the system and takes it again, zeroed, in place.

    The tensor objects and every view of them stay valid.

    Args:
        large_pages: for tensors that are used as a whole. Their memory goes and comes in fewer pieces then, but a
            touch takes more.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, large_pages: bool = False) -> None:
        found = [t.untyped_storage() for t in tensors if t.numel()]
        self._users = Counter(storage.data_ptr() for storage in found)
        self.storages = [(s, s.nbytes()) for s in {storage.data_ptr(): storage for storage in found}.values()]
        self.awake = True
        device = found[0].device if found else torch.device("cpu")
        self._memory = platform.of(device).storage_pool()
        if large_pages:
            for storage, _ in self.storages:
                platform.of(device).prefer_large_pages(storage)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.storages)

    def forget(self, tensor: torch.Tensor) -> None:
        """Release the memory of a tensor that is no longer used for good, unless another of the tensors shares it."""
        address = tensor.untyped_storage().data_ptr()
        self._users[address] -= 1
        if self._users[address] == 0:
            [gone] = [storage for storage, _ in self.storages if storage.data_ptr() == address]
            self.storages = [(storage, size) for storage, size in self.storages if storage is not gone]
            self._memory.release(gone)

    def sleep(self) -> None:
        """Release the memory. The contents are lost; the tensors must not be read before :meth:`wake`."""
        if self.awake:
            for storage, _ in self.storages:
                self._memory.release(storage)
            self._memory.all_released()
            self.awake = False

    def wake(self) -> None:
        """Take the memory back, filled with zeros."""
        if not self.awake:
            for storage, size in self.storages:
                self._memory.take(storage, size, zero=True)
            self.awake = True
