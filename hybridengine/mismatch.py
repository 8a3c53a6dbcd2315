"""Train/inference mismatch: how far the trainer's log-probabilities are from the rollout engine's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridengine.types import Sample


class Mismatch:
    """|logprob(rollout engine) - logprob(trainer)| over the response tokens of one step, all ranks.

    Only tokens that policy ``version`` sampled are compared: what older ones sampled differs for another reason, which
    is counted as ``sampling/off_policy_tokens`` (a fraction).
    """

    def __init__(self, version: int) -> None:
        self.version, self.tokens = version, 0.0
        self.total, self.count, self.largest = 0.0, 0.0, 0.0

    def add(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]] | None = None) -> None:
        """Compare with ``logprobs`` (per sample, per response token) or with the samples' old_logprobs."""
        rollout: list[float] = []
        trainer: list[float] = []
        versions: list[int] = []
        for i, sample in enumerate(samples):
            mine = sample.old_logprobs if logprobs is None else logprobs[i]
            if sample.rollout_logprobs is not None and mine is not None:
                rollout += sample.rollout_logprobs
                trainer += mine
                versions += sample.versions or [self.version] * len(mine)
        if trainer:
            current = torch.tensor(versions) == self.version
            difference = (torch.tensor(rollout) - torch.tensor(trainer)).abs()[current]
            difference = difference[~difference.isnan()]  # counted as completions/unsound, and not trained on
            self.tokens += len(trainer)
            self.total += difference.sum().item()
            self.count += difference.numel()
            self.largest = max(self.largest, difference.max().item() if len(difference) else 0.0)

    def reduce(self) -> dict[str, float]:
        """Collective: mean and max over all ranks, ``{}`` when nothing was compared."""
        sums = torch.tensor([self.total, self.count, self.tokens], dtype=torch.float64)
        largest = torch.tensor([self.largest], dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found = {}
        if sums[2] > sums[1]:
            found["sampling/off_policy_tokens"] = 1 - (sums[1] / sums[2]).item()
        if sums[1]:
            found["sampling/logp_difference/mean"] = (sums[0] / sums[1]).item()
            found["sampling/logp_difference/max"] = largest.item()
        return found
