"""CUDA's semantics on host memory, so that the program's CUDA branches run where there is no GPU.

``install()`` makes the CPU device of this process answer as a GPU does: ``platform.of(cpu)`` is the program's own
CudaPlatform, and what that calls in ``torch.cuda`` is replaced by functions that keep CUDA's promises and refuse what
CUDA refuses. Sources: the CUDA runtime API reference (streams, events, IPC, page locking), torch/cuda/__init__.py,
torch/cuda/memory.py and torch/multiprocessing/reductions.py of torch 2.13.

What is modelled, and how strictly:

- *memory*: a device of :attr:`Device.total` bytes, of which pools and mapped allocations take their share;
- *streams and events*: ``streams.py``; immediate for whole runs, threaded where the order of streams is what is tested;
- *IPC*: an exported storage can't be resized; a handle is opened once per process; memory of an allocator that maps
  and unmaps can't be exported;
- *page locking*: what is unregistered must have been registered, what a stream waits for lies in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.varlen

from hybridengine import native_cuda, platform
from hybridengine.platform.cuda import CudaPlatform, stream_memory
from tests.cuda import streams, varlen

GIB = 2**30
UUID = "GPU-00000000-5ca1-ab1e-0000-000000000000"


class Device:
    """The memory of one GPU, as this process sees it."""

    def __init__(self, total: int = 64 * GIB) -> None:
        self.total = total
        self.others = 0  # bytes that somebody else holds
        self.mapped: dict[int, int] = {}  # address -> bytes of allocations that are mapped piece by piece
        self.unexportable: set[int] = set()  # addresses of such allocations, mapped or not
        self.opened: set[Any] = set()  # IPC handles opened in this process

    @property
    def free(self) -> int:
        return self.total - self.others - sum(self.mapped.values())


DEVICE = Device()


class StandInCuda(CudaPlatform):
    """The program's CudaPlatform; only its process groups are gloo's."""

    backend = "gloo"


def _share_cuda(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """(device, handle, size, offset, ...) as torch returns them; the memory becomes one that others can map."""
    if storage.data_ptr() in DEVICE.unexportable:
        raise RuntimeError("CUDA error: invalid argument (memory of a virtual address range has no IPC handle)")
    fd, size = storage._share_fd_cpu_()
    return 0, f"{os.getpid()}:{os.dup(fd)}".encode(), size, 0, b"counter", 0, b"event", False


def _new_shared_cuda(device: int, handle: bytes, size: int, offset: int, *rest: Any) -> torch.UntypedStorage:
    pid, fd = handle.decode().split(":")
    if int(pid) == os.getpid():
        raise RuntimeError("CUDA error: a process can't open the handles of its own memory")
    if handle in DEVICE.opened:
        raise AssertionError(f"the IPC handle {handle!r} is opened a second time in this process")
    DEVICE.opened.add(handle)
    return torch.UntypedStorage._new_shared_fd_cpu(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size)


def install(total: int = 64 * GIB, *, threaded: bool = False) -> Device:
    """From here on the CPU is a GPU in this process, with ``threaded`` streams or immediate ones. Returns the device,
    which is empty."""
    DEVICE.__init__(total)  # type: ignore[misc]
    driver = streams.use(threaded=threaded)
    stream_memory.driver = lambda: driver
    native_cuda.load = streams.BoxLibrary
    platform.PLATFORMS["cpu"] = "tests.cuda.standin:StandInCuda"
    platform.of.cache_clear()
    cuda: Any = torch.cuda
    # Every name gets a function of its own: torch's compiler looks functions up by identity.
    cuda.set_device = lambda device: None
    cuda.empty_cache = lambda: None
    cuda.mem_get_info = lambda device=None: (DEVICE.free, DEVICE.total)
    cuda.memory_reserved = lambda device=None: 0
    cuda.max_memory_reserved = lambda device=None: 0
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.reset_peak_memory_stats = lambda device=None: None
    cuda.get_device_name = lambda device=None: "stand-in for a GPU"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        uuid=UUID, total_memory=DEVICE.total, name="stand-in for a GPU", gcnArchName=""
    )
    cuda.device_count = lambda: 1
    cuda.can_device_access_peer = lambda device, other: True
    cuda.current_device = lambda: torch.device("cpu")
    cuda.MemPool = object
    cuda.use_mem_pool = lambda pool: contextlib.nullcontext()
    cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=driver.register, cudaHostUnregister=driver.unregister)
    cuda.get_rng_state, cuda.set_rng_state = lambda: torch.zeros(16, dtype=torch.uint8), lambda state: None
    storage: Any = torch.UntypedStorage
    storage._share_cuda_, storage._new_shared_cuda = _share_cuda, staticmethod(_new_shared_cuda)
    torch.nn.attention.varlen.varlen_attn = varlen.varlen_attn
    reinstall()
    return DEVICE


@contextlib.contextmanager
def installed(total: int = 64 * GIB) -> Iterator[Device]:
    """:func:`install`, taken back at the end: for tests in the process of others."""
    places: list[Any] = [torch.cuda, torch.accelerator, torch.nn.attention.varlen, native_cuda, stream_memory]
    before = [(place, dict(vars(place))) for place in places]
    kinds = dict(platform.PLATFORMS)
    try:
        yield install(total)
    finally:
        for place, names in before:
            vars(place).update(names)
        platform.PLATFORMS.update(kinds)
        platform.of.cache_clear()
        storage: Any = torch.UntypedStorage
        del storage._share_cuda_, storage._new_shared_cuda  # torch's own are the base class's


def reinstall() -> None:
    """What vLLM's CPU build takes for itself when it is imported and when it loads a model."""
    streams.name_them()
    accelerator: Any = torch.accelerator
    accelerator.synchronize = lambda device=None: None
    accelerator.empty_cache = lambda: None
    accelerator.get_memory_info = lambda device=None: (DEVICE.free, DEVICE.total)
