"""Canonical parameters of a Hugging Face configuration."""

from __future__ import annotations

from hybridengine.sync.plan.naming.families import HFConfig, decoder_of
from hybridengine.sync.plan.spec import ParamSpec

#: The head of a sequence classifier, [labels, H].
SCORE = "score.weight"


def canonical_params(config: HFConfig, dtype: str = "bfloat16") -> dict[str, ParamSpec]:
    """Every parameter as its checkpoint names it, in model order. Experts are separate parameters."""
    return {name: ParamSpec(name, shape, dtype) for name, shape in decoder_of(config).shapes().items()}
