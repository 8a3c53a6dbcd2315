"""Parts of a loss on flat response tokens: ratio, clip, aggregation.

Shape legend: R response tokens of a micro-batch, B sequences. Masked-out entries may hold anything, NaN included: every
reduction selects with ``where`` and never multiplies by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.types import Sample

#: Log-ratios are cut here before ``exp``, so that no ratio overflows; e^20 is 4.9e8. No gradient beyond it.
MAX_LOG_RATIO = 20.0


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


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a surrogate sees of one micro-batch. Whole sequences; masked-out log-probabilities are 0.

    Attributes:
        logprobs: float32 [R], of the policy that is trained, with gradient.
        old: float32 [R], of the policy that the ratio compares with, without.
        advantages: float32 [R].
        mask: bool [R], the tokens that are trained on.
        sequence_ids: int64 [R], the sequence of each token, in [0, B).
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What is minimised: ``losses`` [R] per token, with gradient; ``sums`` over the trained tokens are metrics."""

    losses: Tensor
    sums: dict[str, Tensor]


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask``, 0 elsewhere. Applied before exp or log, it keeps NaN out of the gradient too."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of ``values`` where ``mask``; both of one shape."""
    return masked(values, mask).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of ``values`` where ``mask``; at least 0, which is what a micro-batch without a token has."""
    return torch.cat([masked(values, mask), values.new_zeros(1)]).max()


def sequence_sum(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Each token's sequence total of ``values`` over unmasked tokens; all [R] -> [R].

    There are at most R sequences, so R slots do without reading the largest id back from the device.
    """
    total = torch.zeros(len(values), dtype=values.dtype, device=values.device)
    return total.index_add(0, sequence_ids, masked(values, mask))[sequence_ids]


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Each token's sequence mean of ``values`` over unmasked tokens, 0 without any; all [R] -> [R]."""
    lengths = sequence_sum(torch.ones_like(values), mask, sequence_ids).clamp(min=1)
    return sequence_sum(values, mask, sequence_ids) / lengths


def token_ratio(batch: TokenBatch) -> Tensor:
    """π / π_old per token [R], with gradient."""
    return (batch.logprobs - batch.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(batch: TokenBatch) -> Tensor:
    """(Π_t π / π_old)^(1/length) per sequence, at each of its tokens [R] (GSPO, arXiv:2507.18071, eq. 7 and 14).

    In the token form: the value is the sequence's, the gradient at a token is the value times that of its own
    log-probability, so that with equal advantages the sum over a sequence has the sequence form's gradient.
    """
    difference = (batch.logprobs - batch.old).detach()
    log_ratio = sequence_mean(difference, batch.mask, batch.sequence_ids)
    return (batch.logprobs - batch.logprobs.detach() + log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()


def clipped_surrogate(batch: TokenBatch, ratio: Tensor, *, low: float, high: float, dual: float = 0.0) -> Surrogate:
    """-min(ratio · A, clip(ratio, 1 - low, 1 + high) · A) (PPO, arXiv:1707.06347, eq. 7).

    Args:
        ratio: [R], with gradient.
        dual: where A < 0, the loss is at most -dual · A (arXiv:1912.09729); 0 = off.
    """
    advantages = batch.advantages
    clipped = ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual), losses)
    return Surrogate(losses, ratio_sums(batch, ratio, low=low, high=high))


def ratio_sums(batch: TokenBatch, ratio: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """The ratio, and how many tokens a clip at [1 - low, 1 + high] takes the gradient from, on each side."""
    return {
        "ratio": masked_sum(ratio.detach(), batch.mask),
        "clip_ratio/low": (batch.mask & (ratio < 1 - low) & (batch.advantages < 0)).sum(),
        "clip_ratio/high": (batch.mask & (ratio > 1 + high) & (batch.advantages > 0)).sum(),
    }


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
        lengths = sequence_sum(torch.ones_like(losses), mask, sequence_ids).clamp(min=1)
        return masked_sum(losses / lengths, mask) / sequences
    raise ValueError(
        f"algorithm.loss_aggregation={mode}: must be token-mean, seq-mean-token-mean, seq-mean-token-sum "
        "or constant-length"
    )
