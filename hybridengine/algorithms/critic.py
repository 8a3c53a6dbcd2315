"""The critic: a value model on a training engine of its own, and what it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridengine.algorithms.losses import LossCounts, aggregate, masked, masked_sum
from hybridengine.algorithms.values import value_losses
from hybridengine.config import CriticConfig
from hybridengine.engines.train.base import LossFn, LossResult, MicroBatch, TrainEngine


class Critic:
    """Beside the policy's engine.

    Args:
        engine: of a value model.
        config: the ``critic`` section.
    """

    def __init__(self, engine: TrainEngine, config: CriticConfig) -> None:
        self.engine, self.config = engine, config

    def in_warmup(self, step: int) -> bool:
        """Whether only the critic is trained in this step (0-based)."""
        return step < self.config.warmup_steps

    def loss_fn(self, counts: LossCounts) -> LossFn:
        """Mean over the trained tokens of an optimizer step of :func:`value_losses`."""

        def loss(values: Tensor, entropy: None | Tensor, micro: MicroBatch) -> LossResult:
            if micro.values is None or micro.returns is None:
                raise ValueError("the critic's loss needs values and returns")
            mask = micro.loss_mask
            values, old = masked(values, mask), masked(micro.values, mask)
            losses = value_losses(values, old, masked(micro.returns, mask), clip=self.config.clip)
            total = aggregate(losses, mask, micro.sequence_ids, counts=counts, mode="token-mean")
            sums = {"loss": total.detach(), "tokens": mask.sum().float()}
            sums["error"] = masked_sum((values - micro.returns).square(), mask).detach().float()
            if self.config.clip is not None:
                sums["clip_ratio"] = (mask & ((values - old).abs() > self.config.clip)).sum().float()
            return LossResult(total, sums)

        return loss

    def metrics(self, sums: Sequence[Mapping[str, float]], last: Mapping[str, float]) -> dict[str, float]:
        """Collective: ``critic/loss``, the mean over optimizer steps; ``critic/error``, the mean squared one of values
        against returns, and ``critic/clip_ratio``, both over tokens; and what the engine said of its last step."""
        if not sums:
            return {}
        names = list(sums[0])
        totals = torch.tensor([sum(each[name] for each in sums) for name in names], dtype=torch.float64)
        torch.distributed.all_reduce(totals)
        found = dict(zip(names, totals.tolist(), strict=True))
        tokens = max(found.pop("tokens"), 1.0)
        found = {name: value / (len(sums) if name == "loss" else tokens) for name, value in found.items()}
        return {f"critic/{name}": value for name, value in {**found, **last}.items()}
