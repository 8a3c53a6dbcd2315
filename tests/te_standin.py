"""A stand-in for Transformer Engine, which needs CUDA: its modules' signatures, parameter names and marks on torch.

Megatron's own wrappers (``TELayerNormColumnParallelLinear`` and the like) are built over what ``install`` puts in place
of the package, so that their code runs as it would over the real one. Names, constructor arguments and the marks that
gradients are reduced by are those of Transformer Engine 2.11; what happens in its kernels is not shown.
"""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

VERSION = "2.11.0"


def install() -> None:
    """Make ``import transformer_engine`` find this. Before megatron is imported, in a process of its own."""
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {},
        ".common.recipe": {"DelayedScaling": Unused},
        ".pytorch": {
            "Linear": Linear, "LayerNormLinear": LayerNormLinear, "GroupedLinear": GroupedLinear, "RMSNorm": RMSNorm,
            "DotProductAttention": Unused,
        },
        ".pytorch.attention": {},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        ".pytorch.cpp_extensions": {"general_gemm": unused},
        ".pytorch.distributed": {"CudaRNGStatesTracker": Unused, "activation_recompute_forward": unused},
        ".pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": nullcontext},
        ".pytorch.module": {},
        ".pytorch.module.base": {"get_workspace": unused, "get_dummy_wgrad": unused},
        ".pytorch.ops": {"Sequential": Unused, "FusibleOperation": Unused},
        ".pytorch.optimizers": {"FusedAdam": Unused, "FusedSGD": Unused},
        ".pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"), unused
        ),
        ".pytorch.tensor": {"QuantizedTensor": Unused},
        ".pytorch.tensor.utils": {"cast_master_weights_to_fp8": unused, "replace_raw_data": unused},
    }  # fmt: skip
    for name, values in contents.items():
        module = types.ModuleType(f"transformer_engine{name}")
        module.__path__ = []  # further submodules are not found
        module.__dict__.update(values)
        sys.modules[module.__name__] = module
        parent, _, leaf = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("not to be called")


class Unused(nn.Module):
    """What the engine must not build: another Adam, another attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unused()


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounded once, after the scale."""
    return (rms_norm(x.float(), x.shape[-1:], None, eps) * weight.float()).to(x.dtype)


class _Module(nn.Module):
    """``TransformerEngineBaseModule``: a state beside the parameters, and the group it is cut over."""

    def __init__(self, tp_group: Any, tp_size: int, sequence_parallel: bool, parallel_mode: str | None) -> None:
        super().__init__()
        assert parallel_mode in (None, "column", "row")
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass

    def _make(self, name: str, *shape: int, device: Any, dtype: torch.dtype) -> None:
        setattr(self, name, nn.Parameter(torch.full(shape, float("nan"), device=device, dtype=dtype)))

    def _multiply(self, x: Tensor, return_bias: bool) -> Any:
        from megatron.core.tensor_parallel import mappings

        assert all(p.dtype == x.dtype for p in self.parameters()), "parameters of another dtype than the input"
        bias = getattr(self, "bias", None)
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        y = linear(x, self.weight)
        if self.parallel_mode == "row":
            if self.sequence_parallel:
                y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
            else:
                y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        if return_bias:
            return y, bias
        return y if bias is None else y + bias


class Linear(_Module):
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Any = None,
        bias: bool = True, return_bias: bool = False, params_dtype: Any = None, parallel_mode: str | None = None,
        parameters_split: Any = None, device: Any = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tp_group, tp_size, sequence_parallel, parallel_mode)
        rows = out_features // (self.tp_size if parallel_mode == "column" else 1)
        columns = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.return_bias = return_bias
        self._make("weight", rows, columns, device=device, dtype=params_dtype)
        if bias:
            self._make("bias", rows, device=device, dtype=params_dtype)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._multiply(inp, self.return_bias)


class LayerNormLinear(_Module):
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, init_method: Any = None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: Any = None,
        parallel_mode: str | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, parameters_split: Any = None, zero_centered_gamma: bool = False,
        device: Any = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tp_group, tp_size, sequence_parallel, parallel_mode)
        assert parallel_mode == "column" and normalization == "RMSNorm" and not zero_centered_gamma
        self.eps, self.return_bias = eps, return_bias
        rows = out_features // self.tp_size
        self._make("layer_norm_weight", in_features, device=device, dtype=params_dtype)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self._make("weight", rows, in_features, device=device, dtype=params_dtype)
        if bias:
            self._make("bias", rows, device=device, dtype=params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._multiply(normed(inp, self.layer_norm_weight, self.eps), self.return_bias)


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Any = None, rng_tracker_name: str | None = None, init_method: Any = None,
        bias: bool = True, return_bias: bool = False, params_dtype: Any = None, parallel_mode: str | None = None,
        device: Any = "cuda", ub_overlap_rs: bool = False, ub_overlap_ag: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(tp_group, tp_size, sequence_parallel, parallel_mode)
        assert self.tp_size == 1 and not bias and not return_bias, "experts are cut by megatron, and have no biases"
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            self._make(f"weight{index}", out_features, in_features, device=device, dtype=params_dtype)

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return torch.cat([linear(part, w) for part, w in zip(inp.split(m_splits), weights, strict=True)])


class RMSNorm(nn.Module):
    def __init__(
        self, normalized_shape: Any = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
        params_dtype: Any = None, zero_centered_gamma: bool = False, hidden_size: int | None = None,
        device: Any = "cuda", dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None) and not zero_centered_gamma
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps = eps
        self.weight = nn.Parameter(torch.full((size,), float("nan"), device=device, dtype=params_dtype or dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Any = None, interleaved: bool = False,
    fused: bool = False, cu_seqlens: Any = None, cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """t [s, b, n, d], freqs float32 [s, 1, 1, d]: in float32, rounded once."""
    assert fused and tensor_format == "sbhd" and not interleaved and cu_seqlens is None
    assert freqs.dtype == torch.float32 and freqs.shape == (t.shape[0], 1, 1, t.shape[-1])
    first, second = t.float().chunk(2, -1)
    return (t.float() * freqs.cos() + torch.cat((-second, first), -1) * freqs.sin()).to(t.dtype)
