"""SAPO (arXiv:2511.20347): a smooth gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.losses import Surrogate, TokenBatch, masked_sum, token_ratio
from hybridengine.algorithms.options import must_be_positive
from hybridengine.config import key


class SAPO(Algorithm):
    """-A · σ(τ (ratio - 1)) · 4/τ, with a temperature τ for each sign of A. At ratio 1 the gradient is GRPO's.

    Ratio 2, A = 1: loss -2.92423, gradient -1.57289.
    """

    @dataclass(kw_only=True)
    class Options:
        tau_positive: float = key(1.0, "temperature of the gate where the advantage is above 0")
        tau_negative: float = key(1.05, "temperature elsewhere; larger: gradients fade sooner off the policy")

        def __post_init__(self) -> None:
            must_be_positive(self, "tau_positive", "tau_negative")

    def surrogate(self, batch: TokenBatch) -> Surrogate:
        ratio = token_ratio(batch)
        tau = torch.full_like(ratio, self.options.tau_negative)
        tau = tau.masked_fill(batch.advantages > 0, self.options.tau_positive)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        slope = (4 * torch.sigmoid(tau * (ratio - 1)) * torch.sigmoid(-tau * (ratio - 1))).detach()
        sums = {"ratio": masked_sum(ratio.detach(), batch.mask), "gate": masked_sum(slope, batch.mask)}
        return Surrogate(-batch.advantages * gate, sums)
