"""Corrections for sampling from a slightly different policy than the one that is scored."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """Token-level truncated importance sampling: min(π_trainer / π_rollout, cap), detached; [R] -> [R].

    The rollout engine's probabilities differ from the trainer's by kernels and precision even at equal
    weights; the weight makes the estimate unbiased up to the cap (Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025).
    """
    return torch.exp((old_logprobs - rollout_logprobs).detach().clamp(max=20.0)).clamp(max=cap)
