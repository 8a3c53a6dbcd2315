"""Regions by kind of device: how a process makes memory that its peers can map, and how they map it."""

from __future__ import annotations

import torch

from hybridengine import platform
from hybridengine.sync.transfer.cuda_ipc import CudaRegion, CudaRegionInfo, MappedCudaRegion
from hybridengine.sync.transfer.region import MappedRegion, Region, RegionInfo

#: platform -> its Region.
REGIONS: dict[str, type[Region]] = {"cpu": Region, "cuda": CudaRegion}


def region_type(device: torch.device) -> type[Region]:
    """What exports tensors of this device."""
    return REGIONS[platform.of(device).name]


def map_region(fd: int, info: RegionInfo, *, writable: bool = False) -> MappedRegion:
    """Open another process's Region of either kind; takes over ``fd``."""
    kind = MappedCudaRegion if isinstance(info, CudaRegionInfo) else MappedRegion
    return kind(fd, info, writable=writable)  # type: ignore[arg-type]
