"""CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4): the ratio is clipped, the token is not."""

from __future__ import annotations

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.losses import Surrogate, TokenBatch, ratio_sums, token_ratio


class CISPO(Algorithm):
    """-sg(clip(ratio)) · A · log π: REINFORCE with a clipped importance weight. No token loses its gradient.

    Ratio 2, clip_high .28, log π = -1, A = 1: loss 1.28, gradient -1.28.
    """

    def surrogate(self, batch: TokenBatch) -> Surrogate:
        low, high = self.config.clip_low, self.config.clip_high
        ratio = token_ratio(batch).detach()
        losses = -ratio.clamp(1 - low, 1 + high) * batch.advantages * batch.logprobs
        return Surrogate(losses, ratio_sums(batch, ratio, low=low, high=high))
