"""What a model does to the product of hidden states and output projection before the softmax, by its configuration.

logits = softcap * tanh(scale * raw / softcap)          softcap None: logits = scale * raw
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Configuration key -> the factor that it stands for. Granite divides by its key, Cohere multiplies by it.
SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda value: value,
    "logits_scaling": lambda value: 1 / value,
    "lm_head_multiplier": lambda value: value,
}
#: Model types whose key of that name does something else.
EXCEPTIONS: dict[tuple[str, str], Callable[[float], float]] = {
    ("hyperclovax", "logits_scaling"): lambda value: value,
}


@dataclass(frozen=True, slots=True)
class LogitsRule:
    """See the module's text."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitsRule:
        """The rule of a Hugging Face configuration."""
        scale = 1.0
        for key, factor in SCALES.items():
            value = getattr(config, key, None)
            if value not in (None, 0):
                scale *= EXCEPTIONS.get((config.model_type, key), factor)(float(value))
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(scale, None if cap is None else float(cap))

    def apply(self, raw: Tensor) -> Tensor:
        """Logits of the product ``raw``, at temperature 1."""
        scaled = raw if self.scale == 1 else raw * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def softcap_at(self, temperature: float) -> float | None:
        """The cap of logits that are already divided by a temperature T: ``c tanh(z / c) / T`` is ``d tanh((z/T) / d)``
        with ``d = c / T``."""
        return None if self.softcap is None else self.softcap / temperature
