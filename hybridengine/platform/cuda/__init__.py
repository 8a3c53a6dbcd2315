"""CudaPlatform: NVIDIA GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hybridengine.native import Stores
from hybridengine.platform.base import BoxRunner, DeviceMemory, Mover, StoragePool, Sums

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule  # a second of imports, which an engine's process need not have


class CudaPlatform:
    """See Platform."""

    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    separate_memory = True
    parks_frozen = True
    runs_transformer_engine = True

    def prepare_process(self) -> None:
        """Nothing has to be."""

    def bind(self, device: torch.device, *, local_size: int) -> None:
        torch.cuda.set_device(device)

    def record_collectives(self, directory: Path) -> None:
        # torch's flight recorder; its variables were renamed, and either name may be the one that is read.
        directory.mkdir(parents=True, exist_ok=True)
        for names, value in (
            (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
            (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), f"{directory}/nccl_"),
            (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
        ):
            for name in names:
                os.environ.setdefault(name, value)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def describe(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def notes(self) -> list[str]:
        return []

    def rng_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state)

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        above = torch.cuda.max_memory_reserved(device) - reserved
        cached = reserved - torch.cuda.max_memory_allocated(device)
        return DeviceMemory(total=total, free=free, peak=total - free + above, cached=cached)

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def storage_pool(self) -> StoragePool:
        from hybridengine.platform.cuda.memory import CudaPool

        return CudaPool()

    def block(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def prefer_large_pages(self, storage: torch.UntypedStorage) -> None:
        """The driver's are large."""

    def mover(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        directory: Path | str | None,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> Mover:
        from hybridengine.platform.cuda.memory import PinnedStore
        from hybridengine.platform.offload import FlatOffload

        return FlatOffload(tensors, store=PinnedStore, prepare=prepare)

    # -- box copies --------------------------------------------------------------------------------

    def new_sums(self, size: int, device: torch.device) -> Sums:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def box_runner(self, device: torch.device, stores: Stores) -> BoxRunner:
        from hybridengine import native_cuda

        return partial(native_cuda.run_boxes, device=device)  # type: ignore[return-value]  # sums are tensors here

    def finish_boxes(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()

    # -- arithmetic --------------------------------------------------------------------------------

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total += torch.mm(a, b)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def accelerate(self, model: nn.Module) -> None:
        """cuBLAS is what torch uses already."""

    def has_varlen_attention(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def accelerate_collectives(self, modules: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        """NCCL is what the group uses already."""
