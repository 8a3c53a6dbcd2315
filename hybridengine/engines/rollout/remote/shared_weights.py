"""Weights that an engine process lends to its trainer rank: one memory, mapped by both.

The worker moves its live weights into a Region once (on a GPU: exports them where they are) and says where it is;
the trainer's rank maps that memory and sees the engine's tensors as tensors of its own. A weight handoff then writes
into them exactly as it writes into an engine in its own process, with the same plan, in the same single pass, and the
engine's process takes no part in it. Only ``begin_update`` and ``finish_update`` are messages.

The other direction, engine workers that map every trainer's Region and pull, moves the same bytes but needs the plan,
the box tables and the fingerprints on both sides, and a new exchange of mappings whenever an engine is restarted.

Descriptors are opened through ``/proc/<pid>/fd``: same user, same node. Nothing appears in the file system, and the
memory is gone when the last process that has it mapped is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridengine.platform.cpu.pages import release_pages
from hybridengine.sync.transfer.control import PAGE_BYTES
from hybridengine.sync.transfer.cuda_ipc import CudaRegion, CudaRegionInfo, MappedCudaRegion
from hybridengine.sync.transfer.region import MappedRegion, Placed, Region, RegionInfo
from hybridengine.sync.transfer.tables import device_of


@dataclass(frozen=True, slots=True)
class Loan:
    """Where a worker's weights are: process, descriptor in it, and what lies where."""

    pid: int
    fd: int
    info: RegionInfo

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(placed) for placed in self.info.table.values())


class Lender:
    """The worker's side.

    Args:
        weights: the model's parameters themselves, by name: they are moved.

    Raises:
        ValueError: another tensor still views a weight's old memory.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter]) -> None:
        tensors: dict[str, torch.Tensor] = dict(weights)
        kind = CudaRegion if device_of(tensors).type == "cuda" else Region
        with torch.no_grad():
            self._region = kind.adopt(tensors, readers=1)
        self._weights = dict(weights)

    @property
    def loan(self) -> Loan:
        return Loan(os.getpid(), self._region.fd, self._region.info)

    def check(self) -> None:
        """Raise LayoutChangedError when the engine has put a weight somewhere else since."""
        self._region.check({name: parameter.data for name, parameter in self._weights.items()})

    def free(self) -> None:
        """Give the memory back to the operating system, for every process that has it mapped; it reads as zeros, and
        the next write takes memory again."""
        if isinstance(self._region, CudaRegion):
            raise RuntimeError("weights that another process maps over CUDA IPC can't leave the GPU")
        release_pages(self._region.data_address, self._region.nbytes - PAGE_BYTES)


class Borrower:
    """The trainer's side: the worker's weights as tensors of this process, writable.

    Raises:
        OSError: the worker's memory can't be opened.
    """

    def __init__(self, loan: Loan) -> None:
        fd = os.open(f"/proc/{loan.pid}/fd/{loan.fd}", os.O_RDWR)
        self._mapped: MappedRegion
        if isinstance(loan.info, CudaRegionInfo):
            self._mapped = MappedCudaRegion(fd, loan.info)
        else:
            self._mapped = _WritableRegion(fd, loan.info)
        self.tensors = {name: self._tensor(name, placed) for name, placed in loan.info.table.items()}

    def _tensor(self, name: str, placed: Placed) -> torch.Tensor:
        dtype = getattr(torch, placed.dtype)
        if isinstance(self._mapped, MappedCudaRegion):
            storage, start = self._mapped.storage(name), placed.offset
        else:
            assert isinstance(self._mapped, _WritableRegion)
            view = torch.frombuffer(
                self._mapped.memory, dtype=torch.uint8, offset=placed.offset, count=max(1, _nbytes(placed))
            )
            storage, start = view.untyped_storage(), int(view.storage_offset())
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, start // dtype.itemsize, placed.shape, placed.strides)  # type: ignore[call-overload]

    def close(self) -> None:
        """Let go; the mapping ends with its last tensor."""
        self.tensors = {}
        self._mapped.close()


class _WritableRegion(MappedRegion):
    """A mapped Region whose tensors may be written."""

    _protection = mmap.PROT_READ | mmap.PROT_WRITE

    @property
    def memory(self) -> mmap.mmap:
        return self._map


def _nbytes(placed: Placed) -> int:
    """Bytes from the first element to one past the last."""
    if 0 in placed.shape:
        return 0
    extent = 1 + sum((n - 1) * stride for n, stride in zip(placed.shape, placed.strides, strict=True))
    return extent * getattr(torch, placed.dtype).itemsize
