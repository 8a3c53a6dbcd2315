"""Persistent buffers: tensors of a checkpoint that are no parameters, such as xIELU's constants."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of floating-point numbers that belong into a checkpoint, by name; the tensors themselves."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name: b for name, b in model.named_buffers() if name in kept and b.is_floating_point()}
