"""Sleep for plain tensors: memory back to the system and taken again, in place."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from hybridengine.memory.storages import OwnPool, as_bytes
from hybridengine.platform.cpu.pages import prefer_large_pages, release_pages

_LARGE = 4 * 2**20


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


class Sleeper:
    """Gives a set of tensors' memory back to the system and takes it again, in place.

    The tensor objects and every view of them stay valid. On a GPU their storage shrinks to nothing and grows. On a CPU
    the pages go from underneath it and come back, zeroed, when they are touched. Freeing would not do: glibc keeps
    in its heap what is below its mmap threshold (most weights), and making it trim the heap takes the freed
    activations of the trainer with it, to be paid for page by page in the next step.

    Args:
        large_pages: CPU: for tensors that are used as a whole. Their memory goes and comes in fewer pieces then, but a
            touch takes 2 MiB.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, large_pages: bool = False) -> None:
        found = [t.untyped_storage() for t in tensors if t.numel()]
        self._users = Counter(storage.data_ptr() for storage in found)
        self.storages = [(s, s.nbytes()) for s in {storage.data_ptr(): storage for storage in found}.values()]
        self.awake = True
        self._gpu_pool = OwnPool()
        for storage, size in self.storages if large_pages else ():
            # Small ones have neighbours on such a page.
            if storage.device.type == "cpu" and size >= _LARGE:
                prefer_large_pages(storage.data_ptr(), size)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.storages)

    def forget(self, tensor: torch.Tensor) -> None:
        """This tensor is used no more: its memory goes for good, unless another of the tensors lies on it."""
        address = tensor.untyped_storage().data_ptr()
        self._users[address] -= 1
        if self._users[address] == 0:
            [gone] = [storage for storage, _ in self.storages if storage.data_ptr() == address]
            self.storages = [(storage, size) for storage, size in self.storages if storage is not gone]
            if gone.device.type == "cpu":
                _give_pages_back(gone)

    def sleep(self) -> None:
        """Contents are lost. What tensors say meanwhile means nothing."""
        if self.awake:
            for storage, _ in self.storages:
                if storage.device.type == "cpu":
                    _give_pages_back(storage)
                else:
                    storage.resize_(0)
            self._gpu_pool.leave()
            self.awake = False

    def wake(self) -> None:
        """Memory is back, contents are zero."""
        if not self.awake:
            for storage, size in self.storages:
                if storage.device.type != "cpu":
                    self._gpu_pool.take(storage, size)
                    as_bytes(storage).zero_()
            self.awake = True


def _give_pages_back(storage: torch.UntypedStorage) -> None:
    """All zero afterwards: anonymous pages come back as zeros, and those it shares with its neighbours are cleared."""
    address, size, contents = storage.data_ptr(), storage.nbytes(), as_bytes(storage)
    if release_pages(address, size):
        contents[: -address % mmap.PAGESIZE].zero_()
        contents[size - (address + size) % mmap.PAGESIZE :].zero_()
    else:
        contents.zero_()
