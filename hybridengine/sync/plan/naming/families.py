"""Explicit table: Hugging Face architecture -> Decoder. One function per family, no guessing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridengine.sync.plan.naming.decoder import Decoder, Experts

#: A transformers configuration, or anything with its attributes.
HFConfig = Any

GEMMA2_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _common(config: HFConfig, architecture: str, **extra: Any) -> Decoder:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Decoder(
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        **extra,
    )


def _llama(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False)))


def _mistral(config: HFConfig, name: str) -> Decoder:
    return _common(config, name)


def _qwen2(config: HFConfig, name: str) -> Decoder:
    return _common(config, name, qkv_bias=True)


def _qwen3(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias)


def _gemma2(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias, norms=GEMMA2_NORMS)


def _gemma3(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias, norms=GEMMA2_NORMS, qk_norm=True)


def _qwen_experts(config: HFConfig, shared: int) -> Experts:
    dense = set(getattr(config, "mlp_only_layers", None) or [])
    step = getattr(config, "decoder_sparse_step", 1)
    return Experts(
        block="mlp",
        count=config.num_experts,
        size=config.moe_intermediate_size,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        shared_size=shared,
        layers=frozenset(
            layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0
        ),
    )


def _qwen2_moe(config: HFConfig, name: str) -> Decoder:
    experts = _qwen_experts(config, config.shared_expert_intermediate_size)
    return _common(config, name, qkv_bias=bool(getattr(config, "qkv_bias", True)), experts=experts)


def _qwen3_moe(config: HFConfig, name: str) -> Decoder:
    bias = bool(getattr(config, "attention_bias", False))
    return _common(config, name, qkv_bias=bias, o_bias=bias, qk_norm=True, experts=_qwen_experts(config, 0))


def _mixtral(config: HFConfig, name: str) -> Decoder:
    experts = Experts(
        block="block_sparse_moe",
        count=config.num_local_experts,
        size=config.intermediate_size,
        gate="w1",
        up="w3",
        down="w2",
        shared_size=0,
        layers=frozenset(range(config.num_hidden_layers)),
    )
    return _common(config, name, experts=experts)


ARCHITECTURES: dict[str, Callable[[HFConfig, str], Decoder]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
}


def decoder_of(config: HFConfig) -> Decoder:
    """The Decoder a Hugging Face configuration describes.

    Raises:
        ValueError: an architecture without an entry, naming it and the ones that have one.
    """
    names = list(getattr(config, "architectures", None) or [])
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(f"no parameter table for architecture {names}; there is one for {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[known[0]](config, known[0])
