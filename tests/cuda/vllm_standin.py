"""vLLM on CUDA, without a GPU: the real engine core, executor and GPU worker over an allocator that maps host memory.

What decides is vLLM's own code of version 0.32: ``LLM.sleep``, ``release_kv_cache_memory`` and ``wake_up``
(entrypoints/llm.py, v1/engine/core.py), the executor's sleeping tags (v1/executor/abstract.py), the GPU worker's
``sleep``, ``wake_up`` and ``discard`` (v1/worker/gpu_worker.py), the allocator's bookkeeping
(device_allocator/cumem.py, sleep_mode_backend.py). Only the calls to the driver are replaced:

- ``unmap_and_release``: the memory is poisoned; whoever writes it before it is mapped again is found out;
- ``create_and_map``: the same address, contents that mean nothing;
- ``cudaMemcpy``: memmove.

Allocations are tagged as the GPU worker tags them: the model's tensors "weights", the caches "kv_cache", and a little
of "runtime", "workspace" and "cudagraph", which no tag defers. The model itself computes with vLLM's CPU kernels on
plain weights, its sampler and request path are the ones that a GPU uses.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from hybridengine.memory.sleeper import tensors_in
from tests.cuda import standin

POISON = 0xA5
#: What memory holds when it has just been mapped. The CPU's attention multiplies cache entries that are not in use by
#: zero, which a GPU's kernels do not load: a number there, not-a-number everywhere else.
GARBAGE = {"kv_cache": 0x3F}
#: Bytes of each kind of memory that wakes with whatever wakes first.
BESIDE = {"runtime": 1 << 16, "workspace": 1 << 17, "cudagraph": 1 << 18}


class Driver:
    """cuMemMap and its like, on host memory."""

    def unmap_and_release(self, handle: tuple[int, int, int, Any]) -> None:
        _, size, address, _ = handle
        assert address in standin.DEVICE.mapped, "memory is unmapped that is not mapped: CUDA_ERROR_INVALID_VALUE"
        del standin.DEVICE.mapped[address]
        ctypes.memset(address, POISON, size)

    def create_and_map(self, handle: tuple[int, int, int, Any]) -> None:
        _, size, address, _ = handle
        assert address not in standin.DEVICE.mapped, "memory is mapped twice: CUDA_ERROR_INVALID_VALUE"
        if size > standin.DEVICE.free:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")
        found = ctypes.string_at(address, size)
        assert found == bytes([POISON]) * size, f"{size} bytes at {address:#x} were written while they were unmapped"
        standin.DEVICE.mapped[address] = size
        ctypes.memset(address, GARBAGE.get(allocator().pointer_to_data[address].tag, 0xFF), size)


class Runtime:
    """The two calls of libcudart that the allocator makes."""

    def cudaMemcpy(self, target: int, source: int, count: int) -> None:  # noqa: N802
        ctypes.memmove(target, source, count)


def install() -> None:
    """After :func:`tests.cuda.standin.install`, before the first engine of this process."""
    import vllm._custom_ops as ops
    import vllm.device_allocator as device_allocator
    from vllm.device_allocator import cumem
    from vllm.platforms import current_platform
    from vllm.v1.worker import cpu_worker, gpu_worker

    ops._supports_onednn = False  # plain weights, as on a GPU
    driver, module = Driver(), _any(cumem)
    module.unmap_and_release, module.create_and_map = driver.unmap_and_release, driver.create_and_map
    module.libcudart, module.cumem_available = Runtime(), True
    cumem.CuMemAllocator.instance = allocator = cumem.CuMemAllocator()
    _any(device_allocator).get_mem_allocator_instance = lambda: allocator
    _any(type(current_platform)).is_sleep_mode_available = lambda self: True
    standin.reinstall()
    GPU, CPU = _any(gpu_worker.Worker), _any(cpu_worker.CPUWorker)
    GPU._maybe_get_memory_pool_context = _pool
    for name in ("sleep", "wake_up", "discard", "sleep_mode_backend", "_get_sleep_parameters",
                 "_save_sleep_parameters", "_restore_sleep_parameters"):  # fmt: skip
        setattr(CPU, name, vars(gpu_worker.Worker)[name])
    CPU._sleep_mode_backend, CPU.get_draft_model = None, lambda self: None
    CPU._sleep_saved_buffers, CPU._sleep_saved_draft_buffers, CPU._sleep_saved_parameters = {}, {}, {}
    CPU._original_load, CPU._original_cache = CPU.load_model, CPU.initialize_from_config
    CPU.load_model, CPU.initialize_from_config = _load_model, _initialize_cache


def allocator() -> Any:
    """The one of this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


@contextlib.contextmanager
def _pool(worker: Any, tag: str) -> Iterator[list[torch.Tensor] | None]:
    """GPU Worker._maybe_get_memory_pool_context: what is put into the list was allocated inside."""
    if not worker.vllm_config.model_config.enable_sleep_mode:
        yield None
        return
    if tag == "weights":
        assert allocator().get_current_usage() == 0, "CuMem allocator can only be used for one instance per process."
    tensors: list[torch.Tensor] = []
    yield tensors
    _allocate(tag, tensors)


def _allocate(tag: str, tensors: list[torch.Tensor]) -> None:
    from vllm.device_allocator import AllocationData

    for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}.values():
        address, size = storage.data_ptr(), storage.nbytes()
        allocator().pointer_to_data[address] = AllocationData((0, size, address, 0), tag)
        standin.DEVICE.mapped[address] = size
        standin.DEVICE.unexportable.add(address)


def _load_model(worker: Any, **options: Any) -> None:
    from vllm.v1.worker import gpu_worker

    with gpu_worker.Worker._maybe_get_memory_pool_context(worker, "weights") as pool:
        worker._original_load(**options)
        standin.reinstall()
        if pool is not None:
            model = worker.model_runner.model
            # Those of the CPU's own kernels are not a GPU's.
            pool += [*model.parameters(), *model.buffers()]


def _initialize_cache(worker: Any, *arguments: Any, **options: Any) -> None:
    from vllm.v1.worker import gpu_worker

    with gpu_worker.Worker._maybe_get_memory_pool_context(worker, "kv_cache") as pool:
        worker._original_cache(*arguments, **options)
        standin.reinstall()
        if pool is not None:
            pool += tensors_in(worker.model_runner.kv_caches)
    worker.beside = {tag: torch.zeros(size, dtype=torch.uint8) for tag, size in BESIDE.items()}
    for tag, tensor in worker.beside.items():
        with gpu_worker.Worker._maybe_get_memory_pool_context(worker, tag) as pool:
            if pool is not None:
                pool.append(tensor)


def _any(thing: Any) -> Any:
    return thing
