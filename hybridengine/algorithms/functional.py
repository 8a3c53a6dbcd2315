"""Masked statistics, KL estimators and loss aggregation on flat response tokens.

Shape legend: R response tokens of a micro-batch, B sequences, V vocabulary. Masked-out entries may hold
anything, NaN included: every reduction selects with ``where`` and never multiplies by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.types import Sample


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Denominators of one optimizer step, over all ranks and micro-batches.

    ``tokens`` that are trained on, and ``sequences`` with at least one such token. Losses divided by these
    add up to the same value however the batch is cut.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> LossCounts:
        """Counts of a list that holds the samples of *all* ranks."""
        trained = [sum(s.loss_mask) for s in samples]
        return cls(tokens=sum(trained), sequences=sum(count > 0 for count in trained))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask``, 0 elsewhere. Applied before exp or log, it keeps NaN out of the gradient too."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of ``values`` where ``mask``; both of one shape."""
    return masked(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask``; 0 when nothing is selected."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (population) variance over the selected entries; 0 elsewhere.

    [[1, 2], [3, pad]] -> [[-1.2247, 0], [1.2247, 0]]. Equal entries become exactly 0.
    """
    wide = values.double()
    if bool((values[mask] == values[mask][:1]).all()):
        return torch.zeros_like(values)
    centred = masked(wide - masked_mean(wide, mask), mask)
    variance = masked_mean(centred.square(), mask)
    return (centred * torch.rsqrt(variance + eps)).to(values.dtype)


def logprobs_of(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at ``tokens``; logits [..., V], tokens [...] -> float32 [...].

    Logits [2, 1, 0] at temperature 0.5, token 0: -0.1429.

    Raises:
        ValueError: temperature 0 (greedy) or below, which has no density.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: log-probabilities need a temperature above 0")
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


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


def aggregate(
    losses: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    counts: LossCounts,
    mode: str,
    constant_length: int | None = None,
) -> Tensor:
    """This micro-batch's share of the step's loss: per-token losses [R] -> scalar.

    Args:
        losses, mask: [R].
        sequence_ids: int64 [R], the sequence of each token, in [0, B).
        counts: of the whole optimizer step.
        mode: token-mean: Σ / tokens. seq-mean-token-mean: mean over sequences of their token means.
            seq-mean-token-sum: Σ / sequences. constant-length: Σ / (sequences · constant_length),
            Dr. GRPO (arXiv:2503.20783).

    Raises:
        ValueError: unknown mode, or constant-length without its length.
    """
    sequences = max(counts.sequences, 1)
    if mode == "token-mean":
        return masked_sum(losses, mask) / max(counts.tokens, 1)
    if mode == "seq-mean-token-sum":
        return masked_sum(losses, mask) / sequences
    if mode == "constant-length":
        if not constant_length:
            raise ValueError("algorithm.constant_length must be set for algorithm.loss_aggregation=constant-length")
        return masked_sum(losses, mask) / (sequences * constant_length)
    if mode == "seq-mean-token-mean":
        # There are at most R sequences, so R slots do without reading the largest id back from the device.
        lengths = torch.zeros(len(losses), dtype=losses.dtype, device=losses.device)
        lengths = lengths.index_add(0, sequence_ids, mask.to(losses.dtype)).clamp(min=1)
        return masked_sum(losses / lengths[sequence_ids], mask) / sequences
    raise ValueError(
        f"algorithm.loss_aggregation={mode}: must be token-mean, seq-mean-token-mean, seq-mean-token-sum "
        "or constant-length"
    )
