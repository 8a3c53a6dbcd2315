"""Hugging Face configuration -> megatron TransformerConfig. One table of architectures, no guessing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hybridengine import platform
from hybridengine.config import TrainConfig
from hybridengine.engines.train.megatron.kernels import Kernels
from hybridengine.sync.plan.naming import decoder_of, megatron_shard_map
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.megatron import MegatronLayout

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

#: Families whose layers megatron's own layer has, with the parameter table of :mod:`hybridengine.sync.plan.naming`.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
)
#: Rotary tables whose frequencies depend on the configuration alone and whose values are not scaled.
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def mapped_decoder(config: Any) -> Decoder:
    """What the checkpoint's configuration describes.

    Raises:
        ValueError: an architecture this engine has no mapping for.
    """
    names = list(getattr(config, "architectures", None) or [])
    if not any(name in ARCHITECTURES for name in names):
        raise ValueError(
            f"model.path: the megatron engine has no mapping for architecture {names}; it has one for "
            f"{', '.join(ARCHITECTURES)}. Use train=fsdp for others"
        )
    return decoder_of(config)


def check_model(config: Any, layout: MegatronLayout, train: TrainConfig) -> Decoder:
    """What the checkpoint's configuration describes, if this engine can train it in this layout.

    Raises:
        ValueError: it can't; naming what stands in the way and what would be right.
    """
    decoder = mapped_decoder(config)
    problems = _unsupported(config, decoder)
    if train.sequence_parallel and layout.tp == 1:
        problems.append("train.sequence_parallel=true needs train.tp of 2 or more")
    if decoder.experts is not None and layout.tp > 1 and not train.sequence_parallel:
        problems.append(f"its experts with train.tp={layout.tp} need train.sequence_parallel=true")
    if problems:
        raise ValueError("\n".join(f"model.path: the megatron engine can't train this model: {p}" for p in problems))
    megatron_shard_map(config, layout)  # raises ValueError naming degrees that do not divide
    return decoder


def _unsupported(config: Any, decoder: Decoder) -> list[str]:
    problems = []
    if config.hidden_act not in ("silu", "swish"):
        problems.append(f"hidden_act={config.hidden_act}, only silu is mapped")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        problems.append(f"rope_type={rope['rope_type']}, must be one of {ROPE_TYPES}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']}, only whole heads are rotated")
    if slides(config):
        problems.append(f"sliding_window={config.sliding_window}, only full attention is mapped")
    if decoder.o_bias != decoder.mlp_bias:
        problems.append("attention_bias without mlp_bias (or the reverse): megatron adds biases to both or neither")
    return problems


def slides(config: Any) -> bool:
    """Whether any layer looks back over a window only."""
    if not getattr(config, "sliding_window", None):
        return False
    types = getattr(config, "layer_types", None)
    if types:
        return any(kind != "full_attention" for kind in types)
    return bool(getattr(config, "use_sliding_window", True))


def transformer_config(
    config: Any,
    decoder: Decoder,
    layout: MegatronLayout,
    train: TrainConfig,
    kernels: Kernels,
    *,
    vpp: int,
    device: torch.device,
) -> TransformerConfig:
    """Megatron's configuration for a model that :func:`check_model` has accepted.

    Gradients are summed over data-parallel ranks, never averaged (``calculate_per_token_loss``): the loss is already
    a share of the global one. Nothing is initialised: the weights come from the checkpoint.
    """
    from megatron.core.transformer import TransformerConfig

    dtype = DTYPES[train.dtype]
    return TransformerConfig(
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden,
        ffn_hidden_size=decoder.intermediate,
        num_attention_heads=decoder.heads,
        num_query_groups=decoder.kv_heads,
        kv_channels=decoder.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=decoder.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=decoder.o_bias,
        add_qkv_bias=decoder.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        sequence_parallel=train.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not platform.of(device).separate_memory,
        perform_initialization=False,
        calculate_per_token_loss=True,
        # Stages exchange one shape per message, except where chunks of one stage pair would mix them up.
        variable_seq_lengths=layout.pp > 1 and vpp == 1,
        # The batched variant gives wrong losses, silently, for two stages of several chunks each.
        batch_p2p_comm=False,
        # The default dispatcher refuses messages of varying length, experts or not.
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        **kernels.fusions(),
        **_experts(config, decoder),
    )


def _experts(config: Any, decoder: Decoder) -> dict[str, Any]:
    moe = decoder.experts
    if moe is None:
        return {}
    normalised = decoder.architecture == "MixtralForCausalLM" or bool(getattr(config, "norm_topk_prob", False))
    return {
        "num_moe_experts": moe.count,
        "moe_ffn_hidden_size": moe.size,
        "moe_router_topk": config.num_experts_per_tok,
        # Probabilities of the chosen experts that sum to 1 are a softmax over the chosen ones alone.
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [int(decoder.has_experts(layer)) for layer in range(decoder.num_layers)],
        "moe_shared_expert_intermediate_size": moe.shared_size or None,
        "moe_shared_expert_gate": bool(moe.shared_size),
    }
