"""What a weight handoff offers, and what it asks of the two engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from hybridengine.distributed.world import World


class HandoffError(RuntimeError):
    """A weight sync did not complete. The rollout engine keeps its old version number and is unservable."""


class StaleGenerationError(HandoffError):
    """A reader and a writer disagree about which generation of the weights is being handed over."""


class LayoutChangedError(HandoffError):
    """A tensor is not where, or not what, it was when the handoff was set up."""


class FingerprintMismatchError(HandoffError):
    """The weights that arrived are not the weights that were sent."""


class PeerLostError(HandoffError):
    """Another rank died, gave up, or did not answer in time."""


@dataclass(slots=True, kw_only=True)
class SyncReport:
    """What one weight sync did on this rank.

    Attributes:
        method: handoff that ran.
        version: policy version the engine holds now.
        bytes_received: bytes that came from other ranks, in the rollout dtype.
        bytes_minimum: bytes this rank needed from other ranks according to the plan.
        bytes_local: bytes copied from this rank's own training shards.
        bytes_aliased: bytes the engine shares with the trainer, neither copied nor held twice.
        extra_bytes: staging memory held by this rank for the handoff.
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
        """What is worth following over the steps of a run, as ``handoff/...``."""
        names = ("bytes_received", "bytes_local", "bytes_aliased", "seconds", "wait_seconds", "fingerprint_seconds")
        return {f"handoff/{name}": float(getattr(self, name)) for name in names}


@dataclass(slots=True, kw_only=True)
class HandoffSettings:
    """Shared by all handoffs.

    Attributes:
        world: this process's place in the job.
        group: ranks that take part, numbered as in the plan; None = all.
        bucket_mib: staging memory per rank at most, MiB.
        verify: compare fingerprints after every sync.
        timeout_seconds: longest wait for another rank.
        apart: training and rollout are on different ranks (``placement=disaggregated``).
        weights_leave: training weights leave their memory between syncs (``memory.offload_weights``).
        weights_dir: on a CPU, the directory to whose disk they leave (``memory.offload_dir``).
    """

    world: World
    group: dist.ProcessGroup | None = None
    bucket_mib: int = 64
    verify: bool = True
    timeout_seconds: float = 600.0
    apart: bool = False
    weights_leave: bool = False
    weights_dir: str | None = None

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib * 2**20


class TensorSource(Protocol):
    """The training side: ``local_tensors`` returns the shards themselves, by the names the ShardMap uses.

    An engine whose shards have further views onto the same memory (FSDP2 keeps a flat one per parameter)
    offers ``memory_holders() -> list[Tensor]``: every tensor object to re-point when the memory is moved.
    """

    def local_tensors(self) -> dict[str, torch.Tensor]: ...


class TensorSink(Protocol):
    """The inference side: ``live_tensors`` returns the weights that the model runs on."""

    def live_tensors(self) -> dict[str, torch.Tensor]: ...


class WeightHandoff(Protocol):
    """Brings the trainer's weights into the rollout engine. Both methods are collective."""

    method: str
    aliases: bool  # the engine runs on some of the trainer's own memory

    def sync(self, version: int) -> SyncReport:
        """Deliver policy ``version``. Raises the same kind of failure on every rank, or on none."""
        ...

    def distrust(self) -> None:
        """The engine was restarted, on any rank: prove the next sync by reading the engine's memory back."""
        ...

    def close(self) -> None:
        """Release what the handoff exported or mapped. Not collective; safe to call twice."""
        ...
