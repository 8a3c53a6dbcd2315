"""Estimates of the divergence from the reference, per token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridengine.algorithms.losses import MAX_LOG_RATIO

KL_ESTIMATORS = ("k1", "k2", "k3", "k3_ratio")


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str,
    *,
    ratio: Tensor | None = None,
    clamp: float = MAX_LOG_RATIO,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from policy samples.

    With d = ref - policy (Schulman, "Approximating KL divergence", 2020), and the expectation of its gradient when it
    is a term of the loss and the samples are the policy's own:

        k1        -d               value KL(policy || ref)    gradient 0: as a loss it is noise and nothing else
        k2        d² / 2           biased, never negative     of KL(policy || ref)
        k3        exp(d) - 1 - d   KL(policy || ref)          of KL(ref || policy), the reverse divergence
        k3_ratio  ratio · k3       KL(policy || ref)          of KL(policy || ref)

    k3_ratio is TRL's default (``use_bias_correction_kl``), NeMo-RL's and DeepSeek-V3.2's (arXiv:2512.02556): the ratio
    brings in the gradient of the sampling probability, which k3 alone leaves out.

    Args:
        ratio: for k3_ratio: π / π_old per token, with its gradient.
        clamp: k3 is exp(d) - 1 - d up to here. Beyond, it goes on along its tangent, so that a token that the policy
            made e^-d times as likely as the reference has a gradient of at most exp(clamp) - 1, and one that drifted
            the other way (d = -30: 29) keeps its pull.

    Raises:
        ValueError: unknown estimator.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"algorithm.kl_estimator={estimator}: must be one of {' | '.join(KL_ESTIMATORS)}")
    tangent = math.expm1(clamp) + (d - clamp) * math.exp(clamp)
    k3 = torch.where(d > clamp, tangent, d.clamp(max=clamp).expm1()) - d
    if estimator == "k3":
        return k3
    if ratio is None:
        raise ValueError("algorithm.kl_estimator=k3_ratio needs the ratio of the policies")
    return ratio * k3
