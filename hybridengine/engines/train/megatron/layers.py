"""The parts of megatron's decoder layer that we supply: norm, attention over packed sequences, rotary angles.

Shape legend: s tokens of a row, b rows, n heads, d head size; N tokens of a packed batch (then b is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from hybridengine.engines.train.fsdp.attention import PackedLayout, attending, packed_attention
from hybridengine.engines.train.megatron.kernels import Kernels
from hybridengine.sync.plan.naming.decoder import Decoder


@dataclass(slots=True)
class Packing:
    """What travels through megatron's layers as ``packed_seq_params``: the sequences of a packed batch.

    Not "thd": rotary angles come per token and attention takes the layout itself, so that megatron has nothing to do.
    """

    layout: PackedLayout
    qkv_format: str = "sbhd"
    cp_group: Any = None


class RMSNorm(nn.Module):
    """As Hugging Face computes it: in float32, then cast, then scaled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees some of the tokens: megatron sums the gradient over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


class CausalAttention(nn.Module):
    """Causal attention over rows (right-padded: no mask needed), or within the sequences of a packed batch."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packing | None = None,
        **unused: Any,
    ) -> Tensor:
        """query [s, b, n, d], key and value [s, b, kv heads, d] -> [s, b, n * d]."""
        rows, width = query.shape[:2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if packed_seq_params is not None:
            with attending(packed_seq_params.layout):
                packed, _ = packed_attention(self, q, k, v, None)
            return packed.reshape(rows, width, -1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).reshape(rows, width, -1)


class RotaryAngles:
    """Angles of rotary positions, from the inverse frequencies that transformers computes for the configuration."""

    def __init__(self, config: Any, device: torch.device) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
            assert scale == 1.0, scale
        self.inverse_frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """int64 [s] -> float32 [s, 1, 1, d]; the second half of d repeats the first."""
        angles = positions[:, None].float() * self.inverse_frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def without_router_state(layer: TransformerLayer) -> Callable[..., Any]:
    """``layer.forward`` for activation recomputation: the expert dispatcher keeps no router weights after it.

    Megatron's dispatcher keeps them until it runs again, and with them the graph behind them, including what attention
    saved. They are dropped in a ``finally``, since recomputation ends the forward pass early by an exception.
    """
    forward = layer.forward
    dispatcher: Any = getattr(layer.mlp, "token_dispatcher", None)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            dispatcher.probs = None

    return forward if dispatcher is None else run


class LocalLayers(LocalSpecProvider):
    """Megatron's own linear layers, with the norm and attention above."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return CausalAttention


class TransformerEngineLayers(TESpecProvider):
    """Transformer Engine's linear layers and norms, with the attention above."""

    def core_attention(self) -> type:
        return CausalAttention


def block_spec(
    decoder: Decoder, config: TransformerConfig, layers: range, kernels: Kernels
) -> TransformerBlockSubmodules:
    """The layers of one model chunk: megatron's layer, made of what ``kernels`` asks for.

    Where norm and projection are one module, the norm's own place is empty; experts are preceded by a norm that the
    router reads too.
    """
    backend: BackendSpecProvider = TransformerEngineLayers() if kernels.transformer_engine else LocalLayers()
    fused, norm = backend.column_parallel_layer_norm_linear(), backend.layer_norm(rms_norm=True)
    qk_norm = backend.layer_norm(rms_norm=True, for_qk=True) if decoder.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=fused or backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )

    def layer(experts: int | None) -> ModuleSpec:
        mlp = get_mlp_module_spec_for_backend(backend, num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm)
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=IdentityOp if fused else norm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=IdentityOp if fused and experts is None else norm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    dense = layer(None)
    sparse = layer(decoder.experts.count) if decoder.experts is not None else dense
    return TransformerBlockSubmodules(
        layer_specs=[sparse if decoder.has_experts(index) else dense for index in layers], layer_norm=norm
    )
