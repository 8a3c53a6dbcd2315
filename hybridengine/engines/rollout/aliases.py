"""Aliases: engine parameters that use the trainer's memory where both hold the same bytes, without a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridengine.memory.sleeper import Sleeper


class AliasedParameters:
    """Which of an engine's parameters are aliases. Only the others sleep, become blank and are checked for data.

    Args:
        own: sleep of the engine's own memory; it forgets what is given up. None for an engine that can't run elsewhere.
    """

    def __init__(self, own: Sleeper | None) -> None:
        self._own = own
        self.names: set[str] = set()

    def alias(self, name: str, parameter: nn.Parameter, tensor: Tensor) -> bool:
        """Point ``parameter`` at ``tensor`` if shape, strides, dtype and device are equal; returns whether it did."""
        present = parameter.data
        if self._own is None or _kind(present) != _kind(tensor):
            return False
        if name not in self.names:
            self._own.forget(present)
            self.names.add(name)
        parameter.data = tensor
        return True

    def without(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that are on the engine's own memory."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.names}


def _kind(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
