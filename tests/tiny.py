"""Tiny random models in Hugging Face directories, for tests of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def make_tiny(path: Path, arch: str = "qwen2", *, seed: int = 0, std: float = 0.1, **overrides: Any) -> Path:
    """Write a random float32 causal language model of ``arch`` (a transformers model type) to ``path``.

    ``overrides`` replace configuration keys. Biases and norms are random too, so that a dropped one shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(arch, **{**_COMMON, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1.0 + noise if parameter.dim() == 1 and bool((parameter == 1).all()) else noise)
    model.save_pretrained(path)
    return Path(path)


def make_small_embedded(path: Path) -> Path:
    """The embedded model and its tokenizer, smaller, and trained for a moment so that some answers are right."""
    from hybridengine.embedded import Recipe, ensure_embedded

    recipe = Recipe(steps=40, batch_size=64, warmup_steps=5, intermediate_size=128)
    return ensure_embedded(recipe, out=path)
