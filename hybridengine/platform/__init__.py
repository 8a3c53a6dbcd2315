"""Platforms: one implementation per kind of device.

The rest of the program asks ``platform.of(device)`` and never looks at what kind of device it is: a reader of the GPU's
path meets nothing that only serves a CPU, and the CUDA branches can be run over a stand-in on a machine without a GPU.
"""

from __future__ import annotations

import functools
import importlib

import torch

from hybridengine.platform.base import Platform, StoragePool

#: torch's device type -> "module:class". Another kind of device is one line here and one package beside these.
PLATFORMS = {
    "cpu": "hybridengine.platform.cpu:CpuPlatform",
    "cuda": "hybridengine.platform.cuda:CudaPlatform",
}


@functools.cache
def of(device: torch.device) -> Platform:
    """The platform of a torch device. Raises ValueError for a type of device that this program does not run on."""
    if device.type not in PLATFORMS:
        raise ValueError(f"device {device}: must be one of {', '.join(PLATFORMS)}")
    module, name = PLATFORMS[device.type].split(":")
    made: Platform = getattr(importlib.import_module(module), name)()
    return made


def local_device(local_rank: int) -> torch.device:
    """The device of the rank with this number on its node: its GPU where there are any, else the CPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


__all__ = ["PLATFORMS", "Platform", "StoragePool", "local_device", "of"]
