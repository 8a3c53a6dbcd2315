"""Algorithms by name. A new one is one file, one line here and one YAML in conf/algorithm/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridengine.algorithms.functional import LossCounts
from hybridengine.algorithms.grpo import GRPO
from hybridengine.config import AlgorithmConfig, RolloutConfig
from hybridengine.engines.train.base import LossFn
from hybridengine.types import Sample, Trajectory


class Algorithm(Protocol):
    """What the trainer asks of an algorithm; see GRPO."""

    needs_reference: bool
    needs_entropy: bool

    def plain_samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]: ...

    def samples(
        self, trajectories: Sequence[Trajectory], ref_logprobs: Sequence[list[float]] | None = None
    ) -> tuple[list[Sample], dict[str, float]]: ...

    def loss_fn(self, counts: LossCounts) -> LossFn: ...

    def metrics(self, sums: Sequence[dict[str, float]]) -> dict[str, float]: ...


ALGORITHMS: dict[str, Callable[[AlgorithmConfig, RolloutConfig], Algorithm]] = {"grpo": GRPO}
