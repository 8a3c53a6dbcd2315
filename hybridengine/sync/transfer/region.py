"""Regions: memory that other processes of the node can map.

A Region is one block: a control page, then tensors at 64-byte aligned offsets. It has no name in the file system and
lives as long as somebody has it open or mapped: a ``memfd``, or an unnamed file on a disk where its pages are to leave
memory between uses. A reader maps it once, the tensors read-only, so that a faulty plan cannot damage the trainer's
weights.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hybridengine.platform.cpu.pages import leave_to_file, release_pages, take, unnamed_file
from hybridengine.sync.transfer.base import LayoutChangedError
from hybridengine.sync.transfer.control import PAGE_BYTES, ControlPage

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor lies in a Region: byte offset from the start of the block, strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """From the first element to one past the last."""
        if 0 in self.shape:
            return 0
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return extent * getattr(torch, self.dtype).itemsize

    def tensor_on(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The tensor, on a storage where it begins at byte ``start``."""
        dtype = getattr(torch, self.dtype)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, start // dtype.itemsize, self.shape, self.strides)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """What a reader must know of a Region besides its file descriptor."""

    nbytes: int
    readers: int
    table: dict[str, Placed]
    on_disk: bool = False


class Region:
    """Memory of this process that others may map. Made by :meth:`allocate` or :meth:`adopt`.

    Attributes:
        fd: file descriptor of the block.
        control: this process's control page.
        table: tensors by name.
    """

    def __init__(self, nbytes: int, *, readers: int, directory: Path | str | None = None) -> None:
        self.nbytes = PAGE_BYTES + _aligned(nbytes, mmap.PAGESIZE)
        self.readers, self.on_disk = readers, directory is not None
        self.table: dict[str, Placed] = {}
        self.fd = _memfd(self.nbytes) if directory is None else unnamed_file(directory, self.nbytes)
        try:
            self._map = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.control = ControlPage(self._map, readers=readers, create=True)
        self._used = PAGE_BYTES

    @classmethod
    def allocate(cls, nbytes: int, *, readers: int) -> Region:
        """Zeroed memory, one tensor ``"bytes"`` (uint8)."""
        region = cls(nbytes, readers=readers)
        region.table["bytes"] = Placed(region._take(nbytes), (nbytes,), (1,), "uint8")
        return region

    @classmethod
    def ring(cls, nbytes: int, device: torch.device, *, readers: int) -> Region:
        """Staging memory on ``device``, one tensor ``"bytes"`` (uint8)."""
        return cls.allocate(nbytes, readers=readers)

    @classmethod
    def adopt(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        readers: int,
        holders: Iterable[torch.Tensor] = (),
        directory: Path | str | None = None,
    ) -> Region:
        """Move tensors into a new Region: same tensor objects, same values, new memory; nothing is held twice.

        Each distinct storage becomes one range of the block, and every tensor object of ``tensors`` and
        ``holders`` that views the storage is re-pointed to it, one storage at a time so that the transient
        extra memory is one storage. Views that are not listed would keep the old memory: list them all.

        Args:
            tensors: what readers may ask for, by name.
            holders: further tensor objects on the same storages (FSDP2's flat padded shards).
            readers: number of ranks that may acknowledge.
            directory: on a disk, where the block is made; None: in memory.

        Raises:
            OSError: no room in the directory.
            ValueError: a tensor is not on the CPU, or some other tensor object still views the old memory
                (it would silently part from the shared weights).
        """
        objects: dict[int, list[torch.Tensor]] = {}
        # A view keeps its base tensor alive, and with it the old memory: bases move along.
        listed = [*tensors.values(), *holders]
        bases = [tensor._base for tensor in listed if tensor._base is not None]
        for tensor in (*listed, *bases):
            if tensor.device != torch.device("cpu"):
                raise ValueError(f"only CPU memory can be moved into a memfd Region, not {tensor.device}")
            if tensor.untyped_storage().nbytes():
                same = objects.setdefault(tensor.untyped_storage().data_ptr(), [])
                if not any(tensor is known for known in same):
                    same.append(tensor)
        del listed, bases
        sizes = [held[0].untyped_storage().nbytes() for held in objects.values()]
        size = sum(_aligned(size, ALIGNMENT) for size in sizes)
        region = cls(size, readers=readers, directory=directory)
        names = {id(tensor): name for name, tensor in tensors.items()}
        for held in objects.values():
            old = held[0].untyped_storage()
            storage = region._storage(old.nbytes())
            storage.copy_(old)
            for tensor in held:
                view = torch.empty(0, dtype=tensor.dtype)
                view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = view
            if (others := torch._C._storage_Use_Count(old._cdata) - 1) > 0:
                name = next((names[id(tensor)] for tensor in held if id(tensor) in names), "a holder")
                raise ValueError(
                    f"{name}: {others} other tensor(s) still view the memory that was moved; list them as holders"
                )
        _return_freed_memory()
        for name, tensor in tensors.items():
            offset = tensor.data_ptr() - region.address if tensor.numel() else PAGE_BYTES
            region.table[name] = Placed(offset, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)[6:])
        return region

    @property
    def info(self) -> RegionInfo:
        return RegionInfo(self.nbytes, self.readers, self.table, self.on_disk)

    @property
    def data_address(self) -> int:
        return self.address + PAGE_BYTES

    def bytes(self) -> np.ndarray:
        """The block after the control page, uint8, writable."""
        return np.frombuffer(self._map, dtype=np.uint8, offset=PAGE_BYTES)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise LayoutChangedError unless every tensor of the table is still exactly where it was put."""
        check_placed(self.table, tensors, lambda name: self.address)

    def release(self) -> None:
        """Give the block's memory back to the operating system, for every process that has it mapped; it reads as
        zeros, and the next write takes memory again."""
        release_pages(self.data_address, self.nbytes - PAGE_BYTES)

    def close(self) -> None:
        """Stop handing the block out. The mapping itself ends with the last tensor in it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _take(self, nbytes: int) -> int:
        offset = self._used
        self._used += _aligned(nbytes, ALIGNMENT)
        assert self._used <= self.nbytes, (self._used, self.nbytes)
        return offset

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        """One storage per tensor rather than one for the block, so that saving one tensor saves only it."""
        view = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=self._take(nbytes))
        return view.untyped_storage()


class MappedRegion:
    """Another process's Region, mapped here, with its control page writable.

    Args:
        fd: taken over: it is closed here once mapped.
        writable: the tensors may be written, too.
    """

    def __init__(self, fd: int, info: RegionInfo, *, writable: bool = False) -> None:
        self.info = info
        try:
            size = os.fstat(fd).st_size
            if size != info.nbytes:
                raise LayoutChangedError(f"a shared block has {size} bytes, {info.nbytes} were announced")
            self._page = mmap.mmap(fd, PAGE_BYTES)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, info.nbytes, flags=flags, prot=protection)
        finally:
            os.close(fd)
        self.control = ControlPage(self._page, readers=info.readers)
        self._array = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._array.ctypes.data)

    @property
    def data_address(self) -> int:
        return self.address + PAGE_BYTES

    def bytes(self) -> np.ndarray:
        """The block after the control page, uint8, read-only."""
        return self._array[PAGE_BYTES:]

    def tensor_address(self, name: str) -> int:
        return self.address + self.info.table[name].offset

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the owner's memory; of a writable region only."""
        placed = self.info.table[name]
        view = torch.frombuffer(self._map, dtype=torch.uint8, offset=placed.offset, count=max(1, placed.nbytes))
        return placed.tensor_on(view.untyped_storage(), int(view.storage_offset()))

    def wake(self) -> None:
        """Reading begins: pages of a disk's file come back in order, before they are touched here and there."""
        if self.info.on_disk:
            take(self.address, self.info.nbytes, write=False)

    def rest(self) -> None:
        """Reading is over for now: pages of a disk's file are not held until it goes on."""
        if self.info.on_disk:
            leave_to_file(self.address, self.info.nbytes)

    def close(self) -> None:
        """The mapping ends with this object."""


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("hybridengine", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_placed(table: Mapping[str, Placed], tensors: Mapping[str, torch.Tensor], base: Callable[[str], int]) -> None:
    """Raise LayoutChangedError for the first tensor that is not as ``table`` says, counted from ``base(name)``."""
    for name, placed in table.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise LayoutChangedError(f"training tensor {name} is gone; set the transfer up again")
        here = Placed(tensor.data_ptr() - base(name), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)[6:])
        if here != placed and tensor.numel():
            raise LayoutChangedError(
                f"training tensor {name} is not where it was shared: now {here}, was {placed}; "
                "set the transfer up again"
            )


def _return_freed_memory() -> None:
    """glibc keeps freed blocks for later; the old shards would count as held twice until then."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
