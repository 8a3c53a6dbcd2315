"""Estimates of the divergence from the reference, per token."""

from __future__ import annotations

from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from policy samples.

    With d = ref - policy (Schulman, "Approximating KL divergence", 2020): k1 = -d, k2 = d²/2,
    k3 = exp(d) - 1 - d. k1 and k3 are unbiased in value; as a *loss*, k1's expected gradient is zero,
    k2's is that of the KL.

    Raises:
        ValueError: unknown estimator.
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        d = d.clamp(-20.0, 20.0)
        return d.expm1() - d
    raise ValueError(f"algorithm.kl_estimator={estimator}: must be k1, k2 or k3")
