"""GSPO (arXiv:2507.18071): ratio and clip belong to the sequence."""

from __future__ import annotations

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.losses import Surrogate, TokenBatch, clipped_surrogate, sequence_ratio


class GSPO(Algorithm):
    """PPO's clipped surrogate on the geometric mean of a sequence's ratios, in the token form.

    Δ = [.1, .3], A = 1: the ratio is e^.2 at both tokens; clipped at .2 the loss is -1.2.
    """

    def surrogate(self, batch: TokenBatch) -> Surrogate:
        config = self.config
        return clipped_surrogate(
            batch, sequence_ratio(batch), low=config.clip_low, high=config.clip_high, dual=config.clip_dual
        )
