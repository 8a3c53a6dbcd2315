"""Corrections for sampling from a slightly different policy than the one that is scored."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.config import Config

OFF_POLICY_SCHEDULES = ("partial", "one_step_off", "async")


def correction_of(config: Config) -> str:
    """``algorithm.correction``, with auto decided: token-level truncation where the schedule is off-policy."""
    chosen = config.algorithm.correction
    if chosen != "auto":
        return chosen
    return "tis" if config.schedule.name in OFF_POLICY_SCHEDULES else "none"


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """Token-level truncated importance sampling: min(π_trainer / π_rollout, cap), detached; [R] -> [R].

    The rollout engine's probabilities differ from the trainer's by kernels and precision even at equal
    weights; the weight makes the estimate unbiased up to the cap (Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training", 2025).
    """
    return torch.exp((old_logprobs - rollout_logprobs).detach().clamp(max=20.0)).clamp(max=cap)


def truncated_sequence_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, sequence_ids: Tensor, *, cap: float
) -> Tensor:
    """Sequence-level weights: min(Π_t π_trainer / π_rollout, cap) over a sequence's unmasked tokens; all [R] -> [R].

    Unbiased up to the cap for the sequence's reward, at a variance that grows with its length.
    """
    ratio = torch.where(mask, (old_logprobs - rollout_logprobs).detach(), torch.zeros_like(old_logprobs))
    total = torch.zeros(len(ratio), dtype=ratio.dtype, device=ratio.device).index_add(0, sequence_ids, ratio)
    return total.clamp(max=20.0).exp().clamp(max=cap)[sequence_ids]
