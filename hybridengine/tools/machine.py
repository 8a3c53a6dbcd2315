"""What a bill is made for: a node's ranks and memory, and what leaves its devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridengine.distributed.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node.

    Attributes:
        ranks: GPUs, or processes on a CPU machine.
        device_gib: memory of one GPU; 0 on a CPU machine.
        host_gib: memory of the node.
    """

    ranks: int
    device_gib: float
    host_gib: float

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.device_gib >= 0 or not self.host_gib > 0:
            raise ValueError(
                f"a machine has at least 1 rank and some memory, not {self.ranks} ranks with {self.device_gib} GiB "
                f"each and {self.host_gib} GiB of host memory"
            )

    @property
    def has_gpus(self) -> bool:
        return self.device_gib > 0

    @property
    def platform(self) -> str:
        """The name of its kind of device."""
        return "cuda" if self.has_gpus else "cpu"

    @property
    def world(self) -> World:
        """Of its first rank: what a configuration for this machine is checked against."""
        device = torch.device("cuda", 0) if self.has_gpus else torch.device("cpu")
        return World(size=self.ranks, local_size=self.ranks, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What leaves the device while it is not needed (the ``memory`` section of the configuration)."""

    offload_optimizer: bool = True
    offload_weights: bool = True
