"""The checkpoint in plain transformers, as its authors' own code scores it: the third opinion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hybridengine.models.rotary import fix_rotary
from hybridengine.types import Sample


@torch.no_grad()
def plain_logprobs(
    path: Path,
    samples: Sequence[Sample],
    *,
    temperature: float,
    dtype: str,
    device: torch.device,
    max_model_len: int,
    trust_remote_code: bool = False,
) -> list[list[float]]:
    """Log-probabilities of each sample's response tokens: one sequence per forward pass, eager attention, no cache."""
    from transformers import AutoModelForCausalLM

    with _no_progress_bar():  # nobody asked for this model to be loaded
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    model = model.eval().to(device)
    fix_rotary(model, max_model_len)
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=device)
        logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        logprobs = (logits / temperature).log_softmax(-1)
        targets = torch.tensor(sample.response_ids, device=device)
        found.append(logprobs.gather(-1, targets[:, None]).squeeze(-1).tolist())
    return found


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers draws none inside."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
