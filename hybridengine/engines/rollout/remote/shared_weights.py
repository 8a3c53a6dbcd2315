"""Weights that an engine process shares with its trainer rank: one memory, mapped by both.

The worker moves its live weights into a Region once (on a GPU: exports them where they are) and sends its address;
the trainer's rank maps that memory and sees the engine's tensors as tensors of its own. A weight transfer then writes
into them exactly as it writes into an engine in its own process, with the same plan, in the same single pass, and the
engine's process takes no part in it. Only ``begin_update`` and ``finish_update`` are messages.

The other direction, engine workers that map every trainer's Region and pull, moves the same bytes but needs the plan,
the box tables and the fingerprints on both sides, and a new exchange of mappings whenever an engine is restarted.

Descriptors are opened through ``/proc/<pid>/fd``: same user, same node. Nothing appears in the file system, and the
memory is gone when the last process that has it mapped is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridengine.sync.transfer.region import RegionInfo
from hybridengine.sync.transfer.regions import map_region, region_type
from hybridengine.sync.transfer.tables import device_of


@dataclass(frozen=True, slots=True)
class SharedWeightsHandle:
    """Where a worker's weights are: process, descriptor in it, and what lies where."""

    pid: int
    fd: int
    info: RegionInfo

    @property
    def nbytes(self) -> int:
        return sum(placed.nbytes for placed in self.info.table.values())


def byte_sums(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> sum of the tensor's bytes: whether two processes see the same weights."""
    return {
        name: int(tensor.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for name, tensor in weights.items()
    }


class WeightExporter:
    """The worker's side.

    Args:
        weights: the model's parameters (and persistent buffers) themselves, by name: they are moved.

    Raises:
        ValueError: another tensor still views a weight's old memory.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        tensors: dict[str, torch.Tensor] = dict(weights)
        with torch.no_grad():
            self._region = region_type(device_of(tensors)).adopt(tensors, readers=1)
        self._weights = dict(weights)

    @property
    def handle(self) -> SharedWeightsHandle:
        return SharedWeightsHandle(os.getpid(), self._region.fd, self._region.info)

    def check(self) -> None:
        """Raise LayoutChangedError when the engine has put a weight somewhere else since."""
        self._region.check({name: parameter.data for name, parameter in self._weights.items()})

    def free(self) -> None:
        """Give the memory back to the operating system, for every process that has it mapped; it reads as zeros, and
        the next write takes memory again."""
        self._region.release()


class WeightImporter:
    """The trainer's side: the worker's weights as tensors of this process, writable.

    Raises:
        OSError: the worker's memory can't be opened.
    """

    def __init__(self, handle: SharedWeightsHandle) -> None:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
        self._mapped = map_region(fd, handle.info, writable=True)
        self.tensors = {name: self._mapped.tensor(name) for name in handle.info.table}

    def close(self) -> None:
        """Drop the tensors; the mapping ends with the last reference to one."""
        self.tensors = {}
        self._mapped.close()
