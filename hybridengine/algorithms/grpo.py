"""GRPO (arXiv:2402.03300) and what differs from it by configuration alone: Dr. GRPO, RLOO, DAPO's clip-higher."""

from __future__ import annotations

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.losses import Surrogate, TokenBatch, clipped_surrogate, token_ratio


class GRPO(Algorithm):
    """PPO's clipped surrogate per token, without a critic."""

    def surrogate(self, batch: TokenBatch) -> Surrogate:
        config = self.config
        return clipped_surrogate(
            batch, token_ratio(batch), low=config.clip_low, high=config.clip_high, dual=config.clip_dual
        )
