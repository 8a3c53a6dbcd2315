"""Rotary embeddings that choose their factors: one rule for trainer and rollout engine.

LongRoPE (Phi-3, Phi-4-mini) has two tables of factors. transformers takes the long ones when the longest position of a
forward pass is beyond the original context, so that a sequence's score depends on what it is batched with. vLLM takes
them for all sequences or for none, by its context length, because keys in the cache must not change. That is the rule
here: the long factors, for every sequence, if the run's context (rollout.max_model_len) is longer than the original.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def fix_rotary(model: nn.Module, max_model_len: int | None) -> bool:
    """Make each LongRoPE module of ``model`` keep the factors of a context of ``max_model_len``; says whether any is.

    Without a length (None) nothing changes: transformers' own rule.
    """
    fixed = False
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope" and max_model_len is not None:
            _fix(module, max_model_len)
            fixed = True
    return fixed


def _fix(module: Any, max_model_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config
    original = config.rope_parameters["original_max_position_embeddings"]
    length = original + 1 if max_model_len > original else None
    old = module.inv_freq
    frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, old.device, seq_len=length)
    module.register_buffer("inv_freq", frequencies.to(old.dtype), persistent=False)
    module.original_inv_freq = module.inv_freq
    module.attention_scaling = scaling
    module.rope_type = "longrope-fixed"  # what transformers' update looks at: nothing is recomputed any more
