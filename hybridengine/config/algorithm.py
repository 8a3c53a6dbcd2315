"""The ``algorithm`` section (baseline, clipping, aggregation, KL, correction, sampling) and PPO's ``critic``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridengine.config.keys import key


@dataclass(kw_only=True)
class CorrectionConfig:
    """Rollout other than policy. What is null is as the preset has it."""

    preset: str = key(
        "auto",
        "weights and rejection for samples of another policy than the trained one; algorithm.correction=NAME for short",
        choices={
            "auto": "by schedule",
            "none": "",
            "tis": "truncated importance weights",
            "tis_sequence": "",
            "mis": "",
            "icepop": "",
            "seq_mask_tis": "",
        },
    )
    weight: str | None = key(None, "importance weight of a token", choices=["none", "token", "sequence", "geometric"])
    bounds: list[float] | None = key(None, "[low, high] of the weight")
    outside: str | None = key(None, "weights outside their bounds", choices=["truncate", "zero"])
    reject: str | None = key(
        None,
        "leave out of loss, count and baseline; costs a forward pass",
        choices=["none", "token", "sequence", "geometric"],
    )
    reject_bounds: list[float] | None = key(None, "[low, high] of what is kept")
    reject_metric: str | None = key(None, "what they bound", choices={"k1": "the ratio", "k3": "a divergence"})


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    """DAPO (arXiv:2503.14476): a batch of groups whose rewards are not all equal."""

    enable: bool = key(False, "replace groups whose rewards are all equal, within the same rollout")
    max_rounds: int = key(10, "groups generated for one batch at most, in multiples of data.prompts_per_step", gt=0)
    on_exhausted: str = key("fill", "after that", choices={"fill": "with groups of equal rewards", "error": ""})


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: str = key("grpo", "algorithm; algorithm=NAME on the command line sets what belongs to it as well")
    fn: str | None = key(None, "an algorithm of your own instead: path.py:Class | package.module:Class")
    kwargs: dict[str, Any] = key({}, "keys of this algorithm alone, see docs/algorithms.md")
    advantage: str = key(
        "group_std",
        "baseline",
        choices={
            "group_std": "GRPO",
            "group_mean": "Dr. GRPO",
            "leave_one_out": "RLOO",
            "batch_std": "REINFORCE++",
            "group_mean_batch_std": "",
            "greedy": "ReMax",
        },
    )
    clip_low: float = key(0.2, "ratio clipped below 1 - clip_low", ge=0, le=1)
    clip_high: float = key(0.2, "ratio clipped above 1 + clip_high (larger than clip_low: clip-higher, DAPO)", ge=0)
    clip_dual: float = key(0.0, "dual-clip bound for negative advantages, above 1; 0 = off", ge=0)
    loss_aggregation: str = key(
        "token-mean",
        "mean over what",
        choices=["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"],
    )
    constant_length: int | None = key(None, "divisor of constant-length; default: rollout.max_tokens", gt=0)
    kl_coef: float = key(0.0, "weight of the KL term against the frozen reference; 0 = no reference model", ge=0)
    kl_estimator: str = key(
        "k3",
        "estimator of the KL term",
        choices={"k1": "kl_in=reward only", "k2": "", "k3": "", "k3_ratio": "k3 with the gradient of its value"},
    )
    kl_clamp: float = key(
        5.0, "k3: largest ref - policy log-probability that is exponentiated; a tangent beyond it", ge=0, le=20
    )
    kl_in: str = key("loss", "where the KL term goes", choices=["loss", "reward"])
    entropy_coef: float = key(0.0, "entropy bonus")
    epochs: int = key(1, "passes over each rollout", gt=0)
    mini_batches: int = key(1, "optimizer steps per pass", gt=0)
    drop_zero_variance: bool = key(False, "leave groups whose rewards are all equal out of the loss and its count")
    mask_truncated: bool = key(False, "leave responses cut at max_tokens out of the loss")
    overlong_buffer: int | None = key(
        None, "penalise responses within so many tokens of rollout.max_tokens, linearly (DAPO); null = off", gt=0
    )
    overlong_penalty: float = key(1.0, "penalty at rollout.max_tokens itself", ge=0)
    old_logprobs: str = key(
        "auto", "where the ratio's denominator comes from", choices=["auto", "recompute", "rollout"]
    )
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass(kw_only=True)
class CriticConfig:
    """The value model of algorithm=ppo."""

    path: str | None = key(
        None, "Hugging Face directory, of a language model or a classifier with one label; default: model.path"
    )
    engine: str | None = key(None, "its training engine; default: train.engine", choices=["fsdp", "megatron"])
    lr: float = key(1e-5, "its peak learning rate; all else as in train", gt=0)
    max_grad_norm: float = key(1.0, "clip its global gradient norm to this; 0 = off", ge=0)
    clip: float | None = key(0.2, "how far values move from what they were at the rollout; null = off", gt=0)
    epochs: int = key(1, "its passes over each rollout, of algorithm.mini_batches optimizer steps each", gt=0)
    warmup_steps: int = key(0, "steps at the start in which only the critic learns", ge=0)
