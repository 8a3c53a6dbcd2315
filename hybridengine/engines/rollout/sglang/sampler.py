"""SGLang's sampler, with a seed per sample that holds across runs and the log-probability of what was sampled.

SGLang ignores ``sampling_seed`` unless all of its deterministic mode is on, and reports log-probabilities of the
distribution before top-k and top-p. Here a token is drawn by inverting the distribution function at one uniform
number, a hash of the sample's seed and the token's position: the batch it is decoded in does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridengine.engines.rollout.seeds import position_seeds

#: Seed of a greedy sample.
GREEDY = -1


class SeededSampler(nn.Module):
    """Stands in for ``model_runner.sampler``. A batch is sampled in one way throughout: greedy, or by seeds."""

    @torch.no_grad()
    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[Any] | None,
        positions: Tensor,
        **_: Any,
    ) -> Tensor:
        """One token per row.

        Args:
            logits_output: ``next_token_logits`` [B, V]; gets ``next_token_logprobs`` [B].
            sampling_info: SGLang's SamplingBatchInfo, with ``sampling_seed`` int64 [B].
            positions: [B], of the token before the one to draw.

        Raises:
            RuntimeError: something was asked for that this sampler would get wrong.
        """
        if any(top_logprobs_nums or ()) or any(token_ids_logprobs or ()):
            raise RuntimeError("the seeded sampler reports the log-probability of the sampled token only")
        logits = logits_output.next_token_logits.float()
        seeds = sampling_info.sampling_seed
        if bool((seeds == GREEDY).all()):
            token = logits.argmax(-1)
            logprob = logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        else:
            logits = logits / sampling_info.temperatures
            if sampling_info.need_min_p_sampling:
                logits = above_min_p(logits, sampling_info.min_ps)
            truncates = sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling
            limits = (sampling_info.top_ks, sampling_info.top_ps) if truncates else None
            uniform = uniforms(seeds, positions)
            token, logprob = draw(logits, uniform, limits)
        logits_output.next_token_logprobs = logprob
        return token


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 [B] in [0, 1): one number per sample and position."""
    mixed = position_seeds(seeds.cpu().numpy().astype(np.uint64), positions.cpu().numpy())
    return torch.from_numpy((mixed >> 11).astype(np.float64) * 2.0**-52).to(seeds.device)


def above_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Logits [B, V] without the tokens less likely than ``min_p`` [B] of the likeliest one."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.log().unsqueeze(-1), float("-inf"))


def draw(logits: Tensor, uniform: Tensor, limits: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probabilities float32 [B] in the distribution they were drawn from.

    Args:
        logits: [B, V], already divided by the temperature.
        uniform: float64 [B].
        limits: top-k and top-p, each [B]: of the k likeliest tokens, those before which less than p of their mass lies.
    """
    order = None
    if limits is not None:
        top_k, top_p = limits
        logits, order = logits.sort(stable=True, dim=-1, descending=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(rank >= top_k.unsqueeze(-1), float("-inf"))
        mass = logits.double().softmax(-1)
        before = mass.cumsum(-1) - mass
        logits = logits.masked_fill(before >= top_p.unsqueeze(-1), float("-inf"))
    cumulated = logits.double().softmax(-1).cumsum(-1)
    place = torch.searchsorted(cumulated, (uniform * cumulated[:, -1]).unsqueeze(-1), right=True)
    logprob = logits.log_softmax(-1).gather(-1, place).squeeze(-1)
    token = place if order is None else order.gather(-1, place)
    return token.squeeze(-1), logprob


def carry_seeds() -> None:
    """Have SGLang hand every sample's seed to the sampler, which it does in deterministic mode only."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch

    def with_seeds(batch: Any, vocab_size: int) -> Any:
        info = original(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor(
            [GREEDY if seed is None else seed for seed in seeds], dtype=torch.int64, device=info.temperatures.device
        )
        return info

    SamplingBatchInfo.from_schedule_batch = with_seeds
