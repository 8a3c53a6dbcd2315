"""CpuPlatform: ranks on a CPU, whose memory is the host's and whose cores they may have to share."""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine import native
from hybridengine.platform.base import BoxRunner, DeviceMemory, Mover, StoragePool, Sums
from hybridengine.platform.cpu import gemm, malloc, pages

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule  # a second of imports, which an engine's process need not have


class CpuPlatform:
    """See Platform."""

    name = "cpu"
    backend = "gloo"
    separate_memory = False
    parks_frozen = False
    runs_transformer_engine = False

    mm = staticmethod(gemm.mm)
    add_mm = staticmethod(gemm.add_mm)
    linear = staticmethod(gemm.linear)
    accelerate = staticmethod(gemm.accelerate)

    def prepare_process(self) -> None:
        malloc.keep_freed_memory()

    def bind(self, device: torch.device, *, local_size: int) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))

    def record_collectives(self, directory: Path) -> None:
        """gloo keeps no record."""

    def synchronize(self) -> None:
        """Nothing is enqueued."""

    def describe(self, device: torch.device) -> str:
        return machine.processor() or machine.machine()

    def notes(self) -> list[str]:
        return [gemm.describe()]

    def rng_state(self) -> Tensor | None:
        return None

    def set_rng_state(self, state: Tensor | None) -> None:
        """torch's own generator is the CPU's."""

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> DeviceMemory | None:
        return None

    def reset_peak(self, device: torch.device) -> None:
        """The host's peak is the tracker's to reset."""

    def release_cached(self) -> None:
        """What the heap keeps serves the next step."""

    def storage_pool(self) -> StoragePool:
        return PagePool()

    def block(self, nbytes: int, device: torch.device) -> Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        pages.prefer_large_pages(block.data_ptr(), nbytes)
        return block

    def prefer_large_pages(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() >= pages.LARGE:  # small ones have neighbours on such a page
            pages.prefer_large_pages(storage.data_ptr(), storage.nbytes())

    def mover(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        directory: Path | str | None,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> Mover:
        from hybridengine.platform.cpu.mapped import MappedOffload
        from hybridengine.platform.offload import FlatOffload

        if directory is not None:
            return MappedOffload(tensors, directory=directory, prepare=prepare)
        return FlatOffload(tensors, prepare=prepare)

    # -- box copies --------------------------------------------------------------------------------

    def new_sums(self, size: int, device: torch.device) -> Sums:
        return np.zeros(size, np.uint64)

    def box_runner(self, device: torch.device, stores: native.Stores) -> BoxRunner:
        return partial(native.run_boxes, stores=stores)  # type: ignore[return-value]  # sums are arrays here

    def finish_boxes(self, device: torch.device) -> None:
        """They are made when run_boxes returns."""

    # -- arithmetic --------------------------------------------------------------------------------

    def has_varlen_attention(self, dtype: torch.dtype) -> bool:
        return False

    def accelerate_collectives(self, modules: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        from hybridengine.platform.cpu.node_comm import share_node_memory

        share_node_memory(modules, group)


class PagePool:
    """See StoragePool: pages go from underneath the tensors, and come back as zeros when they are touched.

    Freeing would not do: glibc keeps in its heap what is below its mmap threshold (most weights), and making it trim
    the heap takes the freed activations of the trainer with it, to be paid for page by page in the next step.
    """

    def release(self, storage: torch.UntypedStorage) -> None:
        pages.zero_by_release(storage)

    def take(self, storage: torch.UntypedStorage, nbytes: int, *, zero: bool = False) -> None:
        """It is taken page by page, zeroed, as it is touched."""

    def all_released(self) -> None:
        """Nothing is kept as a whole."""
