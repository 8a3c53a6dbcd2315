"""What a weight transfer offers, and what it asks of the two engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from hybridengine.distributed.world import World


class WeightSyncError(RuntimeError):
    """A weight sync did not complete. The rollout engine keeps its old version number and is unservable."""


class StaleGenerationError(WeightSyncError):
    """A reader and a writer disagree about which generation of the weights is being handed over."""


class LayoutChangedError(WeightSyncError):
    """A tensor is not where, or not what, it was when the transfer was set up."""


class FingerprintMismatchError(WeightSyncError):
    """The weights that arrived are not the weights that were sent."""


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """What one weight sync did on this rank.

    Attributes:
        method: transfer that ran.
        version: policy version the engine holds now.
        bytes_received: bytes that came from other ranks, in the rollout dtype.
        bytes_minimum: bytes this rank needed from other ranks according to the plan.
        bytes_local: bytes copied from this rank's own training shards.
        bytes_aliased: bytes the engine shares with the trainer, neither copied nor held twice.
        extra_bytes: staging memory held by this rank for the transfer.
        rounds: bucket exchanges (1 where no staging is involved).
        seconds: whole sync.
        wait_seconds: of which waiting for other ranks to publish, fill or drain.
        fingerprint_seconds: of which separate passes and the comparison; the fused part is inside the copy.
        full_check: True when the engine's live memory was read back as a whole.
    """

    method: str
    version: int
    bytes_received: int = 0
    bytes_minimum: int = 0
    bytes_local: int = 0
    bytes_aliased: int = 0
    extra_bytes: int = 0
    rounds: int = 1
    seconds: float = 0.0
    wait_seconds: float = 0.0
    fingerprint_seconds: float = 0.0
    full_check: bool = False

    def metrics(self) -> dict[str, float]:
        """What is worth following over the steps of a run, as ``sync/...``."""
        names = ("bytes_received", "bytes_local", "bytes_aliased", "seconds", "wait_seconds", "fingerprint_seconds")
        return {f"sync/{name}": float(getattr(self, name)) for name in names}


@dataclass(slots=True, kw_only=True)
class TransferSettings:
    """Shared by all transfers.

    Attributes:
        world: this process's place in the job.
        group: ranks that take part, numbered as in the plan; None = all.
        bucket_mib: staging memory per rank at most, MiB.
        verify: compare fingerprints after every sync.
        timeout_seconds: longest wait for another rank.
        disaggregated: training and rollout are on different ranks (``placement=disaggregated``).
        weights_leave: training weights leave their memory between syncs (``memory.offload_weights``).
        weights_dir: on a CPU, the directory to whose disk they leave (``memory.offload_dir``).
    """

    world: World
    group: dist.ProcessGroup | None = None
    bucket_mib: int = 64
    verify: bool = True
    timeout_seconds: float = 600.0
    disaggregated: bool = False
    weights_leave: bool = False
    weights_dir: str | None = None

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib * 2**20


class TensorSource(Protocol):
    """The training side."""

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """The shards themselves, by the names that the ShardMap uses."""
        ...

    def memory_holders(self) -> list[torch.Tensor]:
        """Every further tensor object on the shards' memory: whoever moves that memory must re-point them too."""
        ...

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: each canonical parameter in full, one at a time, same order on all ranks (`gather`)."""
        ...

    def export(self, path: Path) -> None:
        """Collective: write a Hugging Face directory (`checkpoint`)."""
        ...


class TensorSink(Protocol):
    """The inference side."""

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The weights that the model runs on."""
        ...

    def alias_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Run weight ``name`` on ``tensor`` where that is possible; returns whether it does."""
        ...

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        """Deliver one canonical parameter in full (`gather`, `checkpoint`)."""
        ...


class NoEngine:
    """The engine of a kind that this rank has not: no shards, no live weights."""

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def memory_holders(self) -> list[torch.Tensor]:
        return []

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def export(self, path: Path) -> None:
        """The ranks that have one write it."""

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def alias_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        return False

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        """Nothing is delivered here."""


class Peers(Protocol):
    """The other ranks of a transfer."""

    def gone(self) -> list[int]:
        """Those of this node whose process has ended."""
        ...


class WeightTransfer(Protocol):
    """Brings the trainer's weights into the rollout engine, and proves it. :meth:`run` is collective.

    Attributes:
        method: its name in the configuration.
        holds_shards: the trainer's shards have to stay where they are: peers map them, or the engine runs on them.
        bytes_aliased: of the trainer's own memory that the engine runs on, on this rank.
    """

    method: str
    holds_shards: bool
    bytes_aliased: int

    @property
    def peers(self) -> Peers:
        """The other ranks."""
        ...

    def run(self, version: int) -> SyncReport:
        """Deliver policy ``version``. Raises the same kind of failure on every rank, or on none."""
        ...

    def invalidate(self) -> None:
        """The engine's memory is another than before, on any rank: prove the next sync by reading it back."""
        ...

    def close(self) -> None:
        """Release what was exported or mapped. Not collective; safe to call twice."""
        ...
