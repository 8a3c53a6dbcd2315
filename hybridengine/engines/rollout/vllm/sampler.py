"""vLLM's CPU sampler, with seeds for all rows at once and only the log-probability that is asked for.

vLLM keeps one random generator per request and draws from them in a Python loop, ranks the whole vocabulary
to report a single log-probability, compiles a kernel for that (seconds, at the first token) and carries the
result through scheduler and output processor in lists per token. Here the token's seed is a hash of the
sample's seed and the position, the Gumbel noise comes from vLLM's own fused kernel, and the log-probabilities
wait in this object until the request is finished.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridengine.engines.rollout.seeds import position_seeds


class SeededSampler:
    """Stands in for ``model_runner.sampler``.

    A batch is sampled in one way throughout (the engine runs one ``generate`` at a time): greedy, or at one
    temperature with min-p, top-k and top-p. What the engine never asks for (penalties, bad words, ...) is refused.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._seeds: dict[str, int] = {}
        self._drawn: dict[str, tuple[list[int], list[float]]] = {}
        self._rows: list[str] = []
        self._row_seeds: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def add(self, request: str, seed: int) -> None:
        """Announce a request by its internal name before its first token is sampled."""
        self._seeds[request] = seed
        self._drawn[request] = [], []

    def take(self, request: str) -> tuple[list[int], list[float]]:
        """The request's tokens and their log-probabilities; forgets the request."""
        del self._seeds[request]
        return self._drawn.pop(request)

    def clear(self) -> None:
        """Forget every request."""
        self._seeds.clear()
        self._drawn.clear()
        self._rows = []

    @torch.no_grad()
    def __call__(self, logits: Tensor, sampling_metadata: Any, **_: Any) -> Any:
        """Sample one token per row.

        Args:
            logits: [B, V], in the model's dtype; rows in the order of ``runner.input_batch``.
            sampling_metadata: vLLM's SamplingMetadata of the batch.
        """
        from vllm.v1.outputs import SamplerOutput

        _refuse_unsupported(sampling_metadata)
        logits = logits.float()
        token, logits = self._draw(logits, sampling_metadata)
        chosen = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
        batch = self._runner.input_batch
        discard = self._runner.discard_request_mask.np
        drawn = zip(batch.req_ids, token.tolist(), chosen.tolist(), strict=True)
        for row, (request, sampled, logprob) in enumerate(drawn):
            if not discard[row]:  # a row in the middle of its prompt is sampled and thrown away
                tokens, logprobs = self._drawn[request]
                tokens.append(sampled)
                logprobs.append(logprob)
        return SamplerOutput(sampled_token_ids=token.to(torch.int32).unsqueeze(-1), logprobs_tensors=None)

    def _draw(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        """Tokens [B] and the logits [B, V] of the distribution they were drawn from."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        if metadata.all_greedy:
            return logits.argmax(-1), logits
        logits = logits.div_(metadata.temperature.unsqueeze(1))
        for processor in metadata.logitsprocs.argmax_invariant:  # min-p
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
        batch = self._runner.input_batch
        if batch.req_ids != self._rows:
            self._rows = list(batch.req_ids)
            self._row_seeds = np.array([self._seeds[name] for name in self._rows], dtype=np.uint64)
        seeds = position_seeds(self._row_seeds, batch.num_tokens_no_spec[: len(self._rows)])
        return torch.ops._C.fused_gumbel_argmax(logits, torch.from_numpy(seeds)), logits


def _refuse_unsupported(metadata: Any) -> None:
    """Raise RuntimeError for a batch that this sampler would get wrong."""
    wrong = [
        name
        for name, present in {
            "mixed greedy and random requests": not (metadata.all_greedy or metadata.all_random),
            "penalties": not metadata.no_penalties,
            "bad words": bool(metadata.bad_words_token_ids),
            "allowed tokens": metadata.allowed_token_ids_mask is not None,
            "per-request generators": bool(metadata.generators),
        }.items()
        if present
    ]
    if wrong:
        raise RuntimeError(f"the CPU sampler does not support {wrong[0]}")
