"""GPU memory that comes and goes, and page-locked host memory for what has to be kept meanwhile."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from hybridengine.platform.storages import as_bytes


def expandable_segments() -> str:
    """The setting that makes torch's allocator map and unmap GPU memory piece by piece, ``NAME=value``; or empty."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            return f"{name}={os.environ[name]}"
    return ""


class CudaPool:
    """See StoragePool: memory that comes back is taken from a pool of the owner's own.

    In torch's common pool it would be cut out of some larger cached block, beside others' memory, and the block could
    not go back to the driver when the owner leaves. A pool that nobody refers to any more is given back.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def release(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def take(self, storage: torch.UntypedStorage, nbytes: int, *, zero: bool = False) -> None:
        """Grow an emptied storage, in the order of the current stream."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool):
            storage.resize_(nbytes)
        if zero:
            as_bytes(storage).zero_()

    def all_released(self) -> None:
        self._pool = None


class PinnedStore:
    """Page-locked host memory, copied to and from on a side stream. See Store.

    Exactly as large as needed: torch's own pinned allocator rounds up to a power of two, which at tens of GiB is tens
    of GiB.

    Stream hazards: a put must see what the current stream has written, and the device memory may be reused only
    after the put; a get must not overwrite memory that the current stream still reads, and the current stream may
    read only after the get. So the side stream waits for the current one before each transfer, and the current
    stream waits for the side stream in :meth:`wait`. The host waits for neither: device memory comes from and
    returns to the current stream's own pool of the caching allocator, where reuse is in stream order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.capacity = self.allocations = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Raises MemoryError when the system does not lock as many pages."""
        if nbytes <= self.capacity:
            return
        self.close()
        # The mapping lives as long as the tensor; pages are taken when cudaHostRegister locks them.
        buffer = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)
        if int(error) != 0:
            raise MemoryError(
                f"{nbytes / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {int(error)}): "
                "free host memory, raise `ulimit -l`, or turn memory.offload_optimizer or memory.offload_weights off"
            )
        self._buffer, self.capacity = buffer, nbytes
        self.allocations += 1

    def put(self, offset: int, source: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._buffer[offset : offset + source.numel()].copy_(source, non_blocking=True)

    def get(self, offset: int, target: torch.Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(self._buffer[offset : offset + target.numel()], non_blocking=True)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def close(self) -> None:
        if self.capacity:
            self.stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._buffer, self.capacity = torch.empty(0, dtype=torch.uint8), 0
