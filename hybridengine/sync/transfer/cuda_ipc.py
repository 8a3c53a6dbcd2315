"""Regions in GPU memory: exported through CUDA IPC, read by peers over NVLink or PCIe (run on one GPU so far).

Same interface as the memfd Region; the control page and the file descriptor that is passed are host memory.

Lifetimes, where the bugs of this kind of code live:

* One export per storage, however many tensors view it: a second IPC handle of the same allocation would be opened
  a second time. The exporter holds the storages (``_held``), so the allocator cannot give their memory away while
  peers have it mapped.
* A peer opens each handle once, at setup, and holds the storage until ``close``; torch counts consumers in shared
  memory and releases the exporter's block only when the last one has let go.
* Handles carry the exporter's device as a UUID: device numbers differ between processes with different
  CUDA_VISIBLE_DEVICES. The device must be visible to the reader as well.

Ordering is not theirs: ranks follow each other by words of the control pages (``device_pipeline.py``), and a process
that maps weights it only runs on is told by message, after the sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridengine.platform.cuda import stream_memory
from hybridengine.platform.cuda.memory import expandable_segments
from hybridengine.sync.transfer.base import LayoutChangedError
from hybridengine.sync.transfer.region import MappedRegion, Placed, Region, RegionInfo, check_placed


@dataclass(frozen=True, slots=True)
class CudaRegionInfo(RegionInfo):
    """Adds to the host page's description: exported storages and the device they are on.

    ``table`` offsets count from the start of the storage in ``storage_of``.
    """

    uuid: str = ""
    storages: tuple[tuple[Any, ...], ...] = ()
    storage_of: dict[str, int] = field(default_factory=dict)


class CudaRegion(Region):
    """Tensors of this process in GPU memory, exported where they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, readers: int) -> None:
        super().__init__(0, readers=readers)
        # A rank of a rollout pool has no shards to export.
        self._device = next((tensor.device for tensor in tensors.values()), None)
        self._held: list[torch.UntypedStorage] = []
        self._exports: list[tuple[Any, ...]] = []
        self._storage_of: dict[str, int] = {}
        known: dict[int, int] = {}
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = len(self._held)
                self._held.append(storage)
                self._exports.append(storage._share_cuda_())  # type: ignore[attr-defined]
            offset = tensor.data_ptr() - storage.data_ptr()
            self.table[name] = Placed(offset, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)[6:])
            self._storage_of[name] = known[storage._cdata]

    @classmethod
    def adopt(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        readers: int,
        holders: Iterable[torch.Tensor] = (),
        directory: Path | str | None = None,
    ) -> CudaRegion:
        """Export the tensors where they are: device memory needs no move, so ``holders`` are not touched."""
        return cls(tensors, readers=readers)

    @classmethod
    def ring(cls, nbytes: int, device: torch.device, *, readers: int) -> CudaRegion:
        """Staging memory on ``device``, uninitialised: one tensor ``"bytes"`` (uint8)."""
        return cls({"bytes": torch.empty(nbytes, dtype=torch.uint8, device=device)}, readers=readers)

    @property
    def info(self) -> CudaRegionInfo:
        return CudaRegionInfo(
            self.nbytes,
            self.readers,
            self.table,
            uuid="" if self._device is None else str(torch.cuda.get_device_properties(self._device).uuid),
            storages=tuple(self._exports),
            storage_of=self._storage_of,
        )

    def release(self) -> None:
        """Raises RuntimeError: memory that another process maps over CUDA IPC can't leave the GPU."""
        raise RuntimeError("weights that another process maps over CUDA IPC can't leave the GPU")

    @property
    def data_address(self) -> int:
        return self._held[0].data_ptr() + self.table["bytes"].offset

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_placed(self.table, tensors, lambda name: self._held[self._storage_of[name]].data_ptr())


class MappedCudaRegion(MappedRegion):
    """Another process's CudaRegion, opened here."""

    def __init__(self, fd: int, info: CudaRegionInfo, *, writable: bool = True) -> None:
        super().__init__(fd, info)
        index = _index_of(info.uuid) if info.storages else 0
        self._opened = [
            torch.UntypedStorage._new_shared_cuda(index, *export[1:])  # type: ignore[attr-defined]
            for export in info.storages
        ]
        self._storage_of = info.storage_of

    @property
    def data_address(self) -> int:
        return self.tensor_address("bytes")

    def tensor_address(self, name: str) -> int:
        return self._opened[self._storage_of[name]].data_ptr() + self.info.table[name].offset

    def tensor(self, name: str) -> torch.Tensor:
        placed = self.info.table[name]
        return placed.tensor_on(self._opened[self._storage_of[name]], placed.offset)

    def close(self) -> None:
        """Let go of the mapped storages; call after the last kernel that reads them has been acknowledged."""
        torch.cuda.current_stream().synchronize()
        self._opened.clear()


class Peer(NamedTuple):
    """What other ranks need to know of one in order to map its memory.

    Attributes:
        uuid: of its GPU.
        follows_words: its streams can wait for words of host memory.
        expandable: torch maps its memory piece by piece, so no handle stands for a whole allocation.
    """

    uuid: str
    follows_words: bool
    expandable: bool = False


def describe_peer(device: torch.device) -> Peer:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Peer(uuid, stream_memory.supported(device), bool(expandable_segments()))


def obstacle(device: torch.device, peers: Sequence[Peer]) -> str:
    """Why this process can't map the memory of all ``peers``; empty where it can."""
    indices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for rank, peer in enumerate(peers):
        if peer.uuid not in indices:
            return f"the GPU of rank {rank} is hidden from it (CUDA_VISIBLE_DEVICES)"
        other = indices[peer.uuid]
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"its GPU has no peer access to rank {rank}'s"
        if not peer.follows_words:
            return f"the driver of rank {rank} has no 64-bit stream memory operations"
        if peer.expandable:
            return f"rank {rank} allocates expandable segments"
    return ""


def _index_of(uuid: str) -> int:
    """The number of a GPU in this process."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise LayoutChangedError(
        f"GPU {uuid} of another rank is not visible here: do not hide the node's GPUs from each other with "
        "CUDA_VISIBLE_DEVICES, or use sync.method=collective"
    )
