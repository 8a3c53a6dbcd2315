"""A model's config.json, read for its numbers alone: each is looked at before anything is computed from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridengine.sync.plan.naming import ARCHITECTURES, decoder_of
from hybridengine.tools.sizes import hf_config

#: Positive whole numbers that every architecture has.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
#: Those of architectures with experts.
EXPERTS = {
    "Qwen2MoeForCausalLM": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "Qwen3MoeForCausalLM": ("num_experts", "moe_intermediate_size"),
    "MixtralForCausalLM": ("num_local_experts",),
}
#: Those that may be missing or null.
OPTIONAL = (
    "num_key_value_heads", "head_dim", "num_experts_per_tok", "decoder_sparse_step", "max_position_embeddings",
)  # fmt: skip


def read_model(path: str) -> dict[str, Any]:
    """The content of a config.json, of a model directory's, or of the embedded model's.

    Raises:
        ValueError: there is none, or what is wrong in it; names the file.
    """
    if path == "embedded":
        from hybridengine.embedded import ensure_embedded

        path = str(ensure_embedded())
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: no config.json there; give a model directory or the file with --config")
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); give a model's config.json") from None
    if problems := [*_wrong(values)]:
        raise ValueError(f"{file}: {'; '.join(problems)}")
    return dict(values)


def _wrong(values: Any) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"a {type(values).__name__} where a model's config.json has an object of keys"
        return
    names = values.get("architectures")
    if not isinstance(names, list) or not any(name in ARCHITECTURES for name in map(str, names)):
        yield f"architectures={names!r}: must be a list with one of {', '.join(ARCHITECTURES)}"
        return
    found = next(str(name) for name in names if str(name) in ARCHITECTURES)
    sizes = [*_sizes(values, (*SIZES, *EXPERTS.get(found, ())))]
    yield from sizes
    layers = values.get("mlp_only_layers")
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)):
        yield f"mlp_only_layers={layers!r}: must be a list of layer numbers"
    elif not sizes and not decoder_of(hf_config(values)).head_dim:
        yield f"hidden_size={values['hidden_size']}: less than num_attention_heads={values['num_attention_heads']}"


def _sizes(values: Mapping[str, Any], required: tuple[str, ...]) -> Iterator[str]:
    for name in (*required, *OPTIONAL):
        if name not in values and name in required:
            yield f"{name} is missing; it must be a whole number above 0"
        elif (value := values.get(name)) is None and name in OPTIONAL:
            continue
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name}={value!r}: must be a whole number above 0"
