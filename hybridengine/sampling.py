"""How responses are sampled, from the configuration."""

from __future__ import annotations

from hybridengine.config import Config, as_texts
from hybridengine.types import SamplingParams


def training_params(config: Config) -> SamplingParams:
    """For the samples that are trained on."""
    r = config.rollout
    return SamplingParams(
        n=r.samples_per_prompt, max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k,
        min_p=r.min_p, stop=as_texts(r.stop),
    )  # fmt: skip


def validation_params(config: Config) -> SamplingParams:
    """For validation: its own sampling, and the stop strings of training."""
    v = config.rollout.validation
    return SamplingParams(
        n=v.n, max_tokens=v.max_tokens or config.rollout.max_tokens, temperature=v.temperature, top_p=v.top_p,
        top_k=v.top_k, min_p=v.min_p, stop=as_texts(config.rollout.stop),
    )  # fmt: skip
