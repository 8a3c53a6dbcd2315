"""Train/inference mismatch: how far the trainer's log-probabilities are from the rollout engine's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridengine.types import Sample


class Mismatch:
    """|logprob(rollout engine) - logprob(trainer)| over the response tokens of one step, all ranks."""

    def __init__(self) -> None:
        self.total, self.count, self.largest = 0.0, 0.0, 0.0

    def add(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]] | None = None) -> None:
        """Compare with ``logprobs`` (per sample, per response token) or with the samples' old_logprobs."""
        rollout: list[float] = []
        trainer: list[float] = []
        for i, sample in enumerate(samples):
            mine = sample.old_logprobs if logprobs is None else logprobs[i]
            if sample.rollout_logprobs is not None and mine is not None:
                rollout += sample.rollout_logprobs
                trainer += mine
        if trainer:
            difference = (torch.tensor(rollout) - torch.tensor(trainer)).abs()
            self.total += difference.sum().item()
            self.count += difference.numel()
            self.largest = max(self.largest, difference.max().item())

    def reduce(self) -> dict[str, float]:
        """Collective: mean and max over all ranks, ``{}`` when nothing was compared."""
        sums = torch.tensor([self.total, self.count], dtype=torch.float64)
        largest = torch.tensor([self.largest], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if not sums[1]:
            return {}
        return {
            "sampling/logp_difference/mean": (sums[0] / sums[1]).item(),
            "sampling/logp_difference/max": largest.item(),
        }
