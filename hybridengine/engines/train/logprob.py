"""Log-probabilities and entropy of target tokens from hidden states, in chunks, recomputed in backward.

For one position with logits z = W h + b at temperature T, target y and p = softmax(z / T):

    logprob  l = z_y / T - logsumexp(z / T)            dl/dz = (onehot(y) - p) / T
    entropy  H = logsumexp(z / T) - sum_v p_v z_v / T  dH/dz = -p (log p + H) / T

With soft-capped logits (Gemma 2), z / T above is c tanh(u / c) for u the plain logits over T and c the cap over T, and
dz/du = 1 - (z / cT)^2 = 1 - tanh^2(u / c).

The [T, V] logits exist for one chunk of positions at a time, in forward and in backward. Under tensor parallelism
V is a rank's share of the vocabulary: two all-reduces of a chunk's length give the logsumexp, one of R values each
the log-probabilities and entropies.

Shape legend: R positions, V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine import platform


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's weight holds vocabulary rows ``start`` and on; the ranks of ``group`` hold each row once."""

    group: dist.ProcessGroup
    start: int


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under ``softmax((hidden @ weight.T + bias) / temperature)``.

    With hidden states and weights that give logits [2, 1, 0], temperature 0.5 and target 0: -0.1429.

    Args:
        hidden: [R, H], the positions that predict the targets.
        weight: [V, H].
        targets: int64 [R].
        softcap: logits u, over the temperature, become ``softcap * tanh(u / softcap)``; None for none.
        bias: [V] or None.
        chunk_tokens: positions whose float32 logits exist at a time. A batch that fits in one chunk keeps
            its log-probabilities for the backward pass instead of computing them again.
        with_entropy: also the entropy of each distribution, differentiable.
        shard: ``weight`` is this rank's part of the vocabulary, without padding rows. Collective over its group; the
            gradient of ``hidden`` is then this rank's part as well, to be summed over the group.

    Returns:
        float32 [R] log-probabilities, and float32 [R] entropy or None.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, softcap, chunk_tokens, with_entropy, shard
    )
    return logprobs, (entropy if with_entropy else None)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_tokens: int,
        with_entropy: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = hidden.new_empty(len(targets) if with_entropy else 0, dtype=torch.float32)
        # Outside of autograd (ctx.needs_input_grad all False) nothing is kept.
        single = len(targets) <= chunk_tokens and any(ctx.needs_input_grad)
        single = single and softcap is None  # the backward pass needs the capped logits, not only their softmax
        kept: Tensor | None = None
        for part in _chunks(len(targets), chunk_tokens):
            logp, _ = _log_softmax(hidden[part], weight, bias, temperature, softcap, shard)
            logprobs[part] = _pick(logp, targets[part], shard)
            if with_entropy:
                entropy[part] = -(logp.exp() * logp).sum(1)
            kept = logp if single else None
        if shard is not None:
            for total in (logprobs, entropy) if with_entropy else (logprobs,):
                dist.all_reduce(total, group=shard.group)
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, entropy, kept)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.chunk_tokens, ctx.with_entropy, ctx.shard = chunk_tokens, with_entropy, shard
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, logprobs, entropy, kept = ctx.saved_tensors
        if (broken := _without_effect(logprobs, grad_logprobs, grad_entropy)).any():
            # 0 · NaN: such a position would reach every weight. Its row is taken as one of a zero hidden state.
            hidden = hidden.masked_fill(broken[:, None], 0)
            entropy = entropy.masked_fill(broken, 0) if ctx.with_entropy else entropy
            kept = None if kept is None else kept.masked_fill(broken[:, None], 0)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        here = platform.of(hidden.device)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        # Several chunks add up in float32: summing them in bfloat16 would lose the small ones.
        several = len(targets) > ctx.chunk_tokens
        sum_dtype = torch.float32 if several else weight.dtype
        d_weight = torch.zeros_like(weight, dtype=sum_dtype) if need_weight and (several or not len(targets)) else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for part in _chunks(len(targets), ctx.chunk_tokens):
            slope: Tensor | None = None
            if kept is None:
                logp, slope = _log_softmax(
                    hidden[part], weight, bias, ctx.temperature, ctx.softcap, ctx.shard, with_slope=True
                )
            else:
                logp = kept
            scale = grad_logprobs[part, None] / ctx.temperature
            if ctx.with_entropy:
                entropy_scale = grad_entropy[part, None] / ctx.temperature
                # -p (scale + entropy_scale (log p + H)), and onehot below
                p = logp.exp()
                d_logits = logp.add(entropy[part, None]).mul_(entropy_scale).add_(scale).mul_(p).neg_()
            else:
                # Not in place on kept: a second backward over a retained graph reads it again.
                d_logits = (logp.exp() if kept is not None else logp.exp_()).mul_(-scale)
            _add_onehot(d_logits, targets[part], scale, ctx.shard)
            if slope is not None:
                d_logits.mul_(slope)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = here.mm(d_logits, weight)
            if need_weight and d_weight is None:
                d_weight = here.mm(d_logits.t(), hidden[part])
            elif d_weight is not None:
                here.add_mm(d_weight, d_logits.t(), hidden[part])
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


def _without_effect(logprobs: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor) -> Tensor:
    """bool [R]: positions that are no number and have no part in the loss, such as masked-out tokens.

    A hidden state with NaN or infinity gives a log-probability that is not finite, for whatever target.
    """
    unused = grad_logprobs == 0
    if len(grad_entropy):
        unused = unused & (grad_entropy == 0)
    return unused & ~torch.isfinite(logprobs)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _pick(logp: Tensor, targets: Tensor, shard: VocabShard | None) -> Tensor:
    """[chunk] each target's entry; 0 where another rank has it."""
    if shard is None:
        return logp.gather(1, targets[:, None]).squeeze(1)
    rows, columns = _owned(targets, logp.shape[1], shard)
    return logp.new_zeros(len(targets)).index_put((rows,), logp[rows, columns])


def _add_onehot(d_logits: Tensor, targets: Tensor, scale: Tensor, shard: VocabShard | None) -> None:
    """Add ``scale`` [chunk, 1] at each target's entry, in place; nothing where another rank has it."""
    if shard is None:
        d_logits.scatter_add_(1, targets[:, None], scale.expand(-1, 1).contiguous())
        return
    rows, columns = _owned(targets, d_logits.shape[1], shard)
    d_logits[rows, columns] += scale[rows, 0]


def _owned(targets: Tensor, size: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Positions whose target is among this rank's ``size`` rows (it may have none), and those targets' rows."""
    column = targets - shard.start
    rows = torch.nonzero((column >= 0) & (column < size)).squeeze(1)
    return rows, column[rows]


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    shard: VocabShard | None,
    *,
    with_slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """float32 [chunk, V]; the matrix product runs in the weight's dtype, as inference engines do it. And, when asked
    for, the derivative of the capped logits by the plain ones, None where there is no cap."""
    logits = platform.of(hidden.device).linear(hidden, weight, bias).float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    slope: Tensor | None = None
    if softcap is not None:
        bent = logits.div_(softcap).tanh_()
        slope = 1 - bent.square() if with_slope else None
        logits = bent.mul_(softcap)
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    if shard is not None:
        highest = total.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
        total = total.sub_(highest).exp_()
        dist.all_reduce(total, group=shard.group)
        total = total.log_().add_(highest)
    return logits.sub_(total), slope
