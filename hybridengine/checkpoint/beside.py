"""A checkpoint of the policy and of the critic beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hybridengine.checkpoint.checkpointer import Checkpointable
from hybridengine.distributed.errors import agree


@dataclass(frozen=True, slots=True)
class WithCritic:
    """Checkpointable: the critic's folder ``critic`` lies beside the policy's.

    Attributes:
        before_critic: collective; brings the critic's memory to where it can be read, after the policy has been saved.
    """

    policy: Checkpointable
    critic: Checkpointable
    before_critic: Callable[[], None]

    @property
    def version(self) -> int:
        return self.policy.version

    def save(self, path: Path) -> None:
        self.policy.save(path)
        self.before_critic()
        beside = path.with_name("critic")
        with agree(f"making {beside}"):
            if not dist.is_initialized() or dist.get_rank() == 0:
                beside.mkdir()
        self.critic.save(beside)

    def load(self, path: Path) -> None:
        """Raises ValueError: the checkpoint has no critic."""
        beside = path.with_name("critic")
        with agree(f"reading {beside}"):
            if not beside.is_dir():
                raise ValueError(f"checkpoint {path.parent} is of a run without a critic; checkpoint.resume=never")
        self.policy.load(path)
        self.critic.load(beside)
