"""What the trainer asks of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hybridengine.types import Prompt, SamplingParams, Trajectory


class StaleWeightsError(RuntimeError):
    """Generation was asked of an engine whose weights are not a complete, verified policy version."""


class RolloutEngine(Protocol):
    """One model in its inference layout, on the ranks of one tensor-parallel group.

    Life of a weight update: ``begin_update()`` (unservable from here) → a WeightHandoff writes the
    weights → ``finish_update(version)`` (caches reset, servable again). If the handoff fails, finish is
    never called: the version number stays the old one and ``generate`` raises StaleWeightsError.
    """

    weights_version: int  # -1 until the first sync
    replica: int  # index of this rank's tensor-parallel group
    num_replicas: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """n samples per prompt, ordered by (prompt, sample). Same answer on every rank of the replica.

        The sample's seed is a function of (seed, step, prompt.index, sample index) only, so the result
        does not depend on which replica serves it. ``on_finished`` is called as each one completes.

        Raises:
            StaleWeightsError: no complete weights.
            ValueError: a prompt leaves no room in the context for a single token, by name.
        """
        ...

    def begin_update(self) -> None: ...

    def load_weight(self, name: str, full: torch.Tensor) -> None:
        """`gather` handoff: deliver one canonical parameter in full (inside begin/finish)."""
        ...

    def weight_checksums(self) -> dict[str, int]:
        """Fingerprint of every canonical parameter as this engine holds it (this rank's share, additive)."""
        ...

    def finish_update(self, version: int) -> None: ...

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None: ...

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None: ...

    def close(self) -> None: ...
