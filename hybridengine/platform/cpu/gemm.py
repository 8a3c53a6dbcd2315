"""Float32 matrix products on processors that torch's default library does not use fully.

torch gives float32 products to MKL, and MKL stays below AVX-512 where the processor is not Intel's. oneDNN, which comes
with torch as well, does not: one core of an AMD EPYC, [1280, 128] by [128, 512], reaches 116 GFLOP/s with MKL and
258 with oneDNN, in its gradients 108 and 226, and [768, 576] by [576, 49152] 92 and 179. Both round each product in
their own order, so the choice depends on the machine alone, never on a measurement: a resumed run makes it again.

Small products stay with MKL, whose calls cost less.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Multiplications from which oneDNN's call pays: [32, 128] by [128, 512].
MIN_PRODUCTS = 32 * 128 * 512


@functools.cache
def uses_onednn() -> bool:
    """Whether large float32 products on this machine's processor go to oneDNN."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor_vendor() not in ("GenuineIntel", "")
    )


def processor_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel names it ("AuthenticAMD"); empty where it does not."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def describe() -> str:
    """One line: the library that multiplies float32 matrices, and why."""
    if uses_onednn():
        return f"float32 matrix products: oneDNN, because MKL leaves AVX-512 unused on {processor_vendor()}"
    return "float32 matrix products: torch's default library"


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices, [M, K] and [K, N] in any strides; not differentiable."""
    if _worthwhile(a, b, len(a) * b.numel()):
        return _onednn(a, b.t(), None)
    return torch.mm(a, b)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, in the precision of ``total``."""
    if total.dtype == a.dtype and not _worthwhile(a, b, len(a) * b.numel()):
        total.addmm_(a, b)
    else:
        total += mm(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` with its gradients: [..., K], [N, K], [N] -> [..., N]."""
    if not _worthwhile(x, weight, x.numel() * len(weight)):
        return functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def accelerate(model: nn.Module) -> None:
    """Let the model's linear layers compute with :func:`linear`, where that makes a difference."""
    if not uses_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _worthwhile(a: Tensor, b: Tensor, products: int) -> bool:
    return (
        products >= MIN_PRODUCTS
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and uses_onednn()
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            mm(rows, weight).view(x.shape) if need_x else None,
            mm(rows.t(), x.reshape(-1, x.shape[-1])) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )
