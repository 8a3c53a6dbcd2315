"""What a Hugging Face configuration says about a decoder, read in one way everywhere. Imports no transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: A transformers configuration, or anything with its attributes.
HFConfig = Any


def text_config(config: HFConfig) -> HFConfig:
    """The decoder's part of a configuration."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get is not None else config


def rope_parameters(config: HFConfig) -> list[dict[str, Any]]:
    """Of each kind of layer that has rotary embeddings of its own; most models have one kind."""
    found = getattr(text_config(config), "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in found.values()):
        return [value for value in found.values() if isinstance(value, dict)]
    return [found] if found else []


def sliding_windows(config: HFConfig) -> list[int]:
    """Distinct windows that some layer looks back over, in tokens."""
    config = text_config(config)
    types = getattr(config, "layer_types", None)
    if types and not any("sliding" in kind or "chunked" in kind for kind in types):
        return []
    if not types and not getattr(config, "use_sliding_window", True):
        return []
    keys = ("sliding_window", "attention_chunk_size")
    sizes: Iterator[Any] = (getattr(config, key, None) for key in keys)
    return sorted({size for size in sizes if isinstance(size, int) and size > 0})


def context_length(config: HFConfig) -> int | None:
    """Tokens that the model's positions reach: what scaled rotary embeddings add counts; None where nothing says.

    YaRN reaches ``factor * original_max_position_embeddings``, linear scaling ``factor * max_position_embeddings``;
    configurations differ in whether max_position_embeddings already has the factor.
    """
    config = text_config(config)
    limit = next(
        (getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")
         if getattr(config, key, None)), None
    )  # fmt: skip
    if limit is None:
        return None
    reached = int(limit)
    for rope in rope_parameters(config):
        factor, original = rope.get("factor") or 1.0, rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "yarn" and original:
            reached = max(reached, int(factor * original))
        elif rope.get("rope_type") == "linear":
            reached = max(reached, int(factor * limit))
    return reached


def head_sizes(config: HFConfig) -> tuple[int, int]:
    """(of queries and keys, of values)."""
    config = text_config(config)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_nope_head_dim", None):
        key = (getattr(config, "qk_nope_head_dim", 0) or 0) + (getattr(config, "qk_rope_head_dim", 0) or 0)
        return key, int(getattr(config, "v_head_dim", None) or key)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return int(size), int(getattr(config, "v_head_dim", None) or size)
