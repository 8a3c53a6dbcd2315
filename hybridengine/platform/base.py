"""Platform: the questions and operations whose answer depends on the kind of device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.native import Stores

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule  # a second of imports, which an engine's process need not have

#: Accumulators of fingerprints, modulo 2**64: a uint64 array on the host, an int64 tensor on a GPU, None for none.
Sums = np.ndarray | Tensor | None


#: (boxes, sums).
BoxRunner = Callable[[np.ndarray, Sums], None]


class DeviceMemory(NamedTuple):
    """Bytes of one device's memory, over all processes.

    Attributes:
        total, free: as the driver counts.
        peak: used at most since the last :meth:`Platform.reset_peak`.
        cached: free bytes that torch's allocator of this process keeps for later.
    """

    total: int
    free: int
    peak: int
    cached: int

    @property
    def used(self) -> int:
        return self.total - self.free


class Mover(Protocol):
    """Moves one owner's bytes.

    A method may fail half-way (out of memory, a full disk). Called again, or its opposite called, it must
    finish from whatever it finds: no byte may be lost in between. A mover may also have ``prefetch()``,
    which starts to bring host bytes back without waiting.
    """

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def drop(self) -> None: ...

    def nbytes(self) -> int:
        """Bytes the owner holds when it is on the device."""
        ...


class StoragePool(Protocol):
    """Gives the memory under one owner's tensors back to the system and takes it again, in place.

    Tensor objects and their views stay valid; what they hold while the memory is gone means nothing.
    """

    def release(self, storage: torch.UntypedStorage) -> None:
        """Release the storage's memory; its contents are lost."""
        ...

    def take(self, storage: torch.UntypedStorage, nbytes: int, *, zero: bool = False) -> None:
        """Take the storage's memory again, perhaps at another address; ``zero``: filled with zeros.

        Raises:
            torch.OutOfMemoryError: there is not as much.
        """
        ...

    def all_released(self) -> None:
        """None of the owner's storages has memory now: what was kept for them as a whole can go."""
        ...


class Platform(Protocol):
    """One kind of device.

    Attributes:
        name: "cpu" or "cuda"; vendors' folders have a file by that name for what they do there.
        backend: of torch.distributed, for groups whose tensors are on such devices and on the host.
        separate_memory: the device has memory of its own; False: it is the host's, and others' too.
        parks_frozen: FSDP2 keeps a frozen model's shards on the host and streams them in.
        runs_transformer_engine: Transformer Engine's layers run there, and compiling a small kernel pays.
    """

    name: str
    backend: str
    separate_memory: bool
    parks_frozen: bool
    runs_transformer_engine: bool

    # -- the process -------------------------------------------------------------------------------

    def prepare_process(self) -> None:
        """Settings of this process that have to come before its first tensor."""
        ...

    def bind(self, device: torch.device, *, local_size: int) -> None:
        """From here on this process works on ``device``, beside ``local_size - 1`` others on its node."""
        ...

    def synchronize(self) -> None:
        """Return once everything that was enqueued on the device is done."""
        ...

    def describe(self, device: torch.device) -> str:
        """The device's name, for reports."""
        ...

    def notes(self) -> list[str]:
        """What was chosen for this machine, a line each, to be printed once."""
        ...

    def rng_state(self) -> Tensor | None:
        """State of the device's own random generator; None where it has none."""
        ...

    def set_rng_state(self, state: Tensor | None) -> None: ...

    # -- memory ------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Memory of the device; None where it is the host's."""
        ...

    def reset_peak(self, device: torch.device) -> None: ...

    def release_cached(self) -> None:
        """Free memory that torch keeps for later goes back to the driver, for others to allocate."""
        ...

    def storage_pool(self) -> StoragePool: ...

    def block(self, nbytes: int, device: torch.device) -> Tensor:
        """uint8 [nbytes] that many tensors will share."""
        ...

    def prefer_large_pages(self, storage: torch.UntypedStorage) -> None:
        """Advice for a storage that is used as a whole."""
        ...

    def mover(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        directory: Path | str | None,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> Mover:
        """What moves a set of tensors between device and host; ``directory``: to a disk instead (CPU)."""
        ...

    # -- box copies --------------------------------------------------------------------------------

    def new_sums(self, size: int, device: torch.device) -> Sums:
        """``size`` accumulators, zero."""
        ...

    def box_runner(self, device: torch.device, stores: Stores) -> BoxRunner:
        """What copies boxes (rows of native.BOX_DTYPE) and adds their fingerprints to sums; on a GPU: enqueues it."""
        ...

    def finish_boxes(self, device: torch.device) -> None:
        """Return once the enqueued copies have been made."""
        ...

    # -- arithmetic --------------------------------------------------------------------------------

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` of two matrices, [M, K] and [K, N] in any strides; not differentiable."""
        ...

    def add_mm(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """``total += a @ b``, in the precision of ``total``."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``torch.nn.functional.linear``, differentiable."""
        ...

    def accelerate(self, model: nn.Module) -> None:
        """Have the model's linear layers compute with :meth:`linear` where that makes a difference."""
        ...

    def has_varlen_attention(self, dtype: torch.dtype) -> bool:
        """Whether torch's attention over packed sequences has a kernel for this dtype."""
        ...

    def record_collectives(self, directory: Path) -> None:
        """Before the process groups: have the backend write its last collectives there when one times out."""
        ...

    def accelerate_collectives(self, modules: Sequence[FSDPModule], group: dist.ProcessGroup) -> None:
        """Collective: let FSDP2 modules use something faster than the backend, where the ranks can."""
        ...
