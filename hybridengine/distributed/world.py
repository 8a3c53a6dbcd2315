"""World: this process's rank and device, read once from torchrun's environment and passed explicitly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.platform import Platform


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the job.

    ``device`` is ``cuda:<local_rank>`` when CUDA is available, else ``cpu``.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> World:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; without torchrun this is world size 1."""
        env = os.environ if env is None else env
        rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
        local_rank = int(env.get("LOCAL_RANK", str(rank)))
        local_size = int(env.get("LOCAL_WORLD_SIZE", str(size)))
        if not 0 <= rank < size:
            raise ValueError(f"RANK={rank} is not in [0, WORLD_SIZE={size})")
        return cls(
            rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=platform.local_device(local_rank)
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def platform(self) -> Platform:
        """The Platform of this rank's device."""
        return platform.of(self.device)


def init_process_group(world: World, *, timeout_seconds: float) -> None:
    """Start torch.distributed (the backend of the platform). World size 1 gets a group too.

    Every collective of the default group is bounded by ``timeout_seconds``.
    """
    if world.size == 1:
        for key, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    world.platform.bind(world.device, local_size=world.local_size)
    dist.init_process_group(world.platform.backend, timeout=timedelta(seconds=timeout_seconds))


def replica_group(world: World, tp: int, **options: Any) -> dist.ProcessGroup | None:
    """Collective: the group of the ``tp`` ranks that this rank's rollout replica consists of; None for one rank.

    ``options`` are those of ``torch.distributed.new_group``.
    """
    if tp == 1:
        return None
    groups = [dist.new_group(range(first, first + tp), **options) for first in range(0, world.size, tp)]
    return groups[world.rank // tp]


def free_port() -> int:
    """A TCP port that was free on the loopback interface a moment ago."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
