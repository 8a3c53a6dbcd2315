"""Regions by kind of device: how a process makes memory that its peers can map, and how they map it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.sync.transfer.cuda_ipc import CudaRegion, CudaRegionInfo, MappedCudaRegion, describe_peer, obstacle
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


def why_not_mapped(device: torch.device, group: dist.ProcessGroup | None) -> str:
    """Why ranks of one node can't map each other's memory; empty where they can. The same on all (collective)."""
    if not platform.of(device).separate_memory or dist.get_world_size(group) == 1:
        return ""
    peers: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(peers, describe_peer(device), group=group)
    reasons: list[str] = [""] * len(peers)
    dist.all_gather_object(reasons, obstacle(device, peers), group=group)  # type: ignore[arg-type]
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
