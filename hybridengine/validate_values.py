"""Single values of the configuration: choices, ranges, and what they are called on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config import Config, RolloutConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "train.engine": ("fsdp", "megatron"),
    "train.dtype": ("float32", "bfloat16"),
    "train.transformer_engine": ("auto", "true", "false"),
    "train.moe_balancing": ("none", "aux_loss", "bias"),  # bias is refused with its reason
    "train.lr_schedule": ("constant", "cosine", "linear"),
    "train.shard_order": ("auto", "rank"),
    "rollout.engine": ("vllm", "sglang", "transformers"),
    "rollout.process": ("auto", "same", "separate"),
    "rollout.dtype": ("float32", "bfloat16"),
    "handoff.method": ("auto", "pull", "collective", "gather", "broadcast", "delta", "checkpoint"),
    "algorithm.name": ("grpo",),
    "algorithm.advantage": ("group_std", "group_mean", "leave_one_out"),
    "algorithm.loss_aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.old_logprobs": ("auto", "recompute", "rollout"),
    "algorithm.correction": ("auto", "none", "tis", "tis_sequence"),
    "reward.on_error": ("auto", "raise", "zero"),
    "monitor.action": ("warn", "stop"),
    "data.chat": ("auto", "true", "false"),
    "data.overlong": ("drop", "truncate", "error"),
    "placement.name": ("colocated", "disaggregated"),
    "schedule.name": ("sync", "partial", "one_step_off", "async"),
}

POSITIVE = (
    "train.tp", "train.pp", "train.ep", "train.vpp",
    "train.lr", "train.eps", "train.max_tokens_per_micro_batch", "train.logprob_chunk_tokens", "rollout.tp",
    "rollout.samples_per_prompt", "rollout.max_tokens", "rollout.temperature", "rollout.max_num_seqs",
    "rollout.kv_cache_gib", "rollout.validation.n", "handoff.bucket_mib",
    "algorithm.epochs", "algorithm.mini_batches", "algorithm.correction_cap", "reward.timeout_seconds",
    "reward.workers", "reward.memory_gib", "data.size", "data.max_prompt_tokens", "data.prompts_per_step", "epochs",
    "distributed.timeout_seconds",
)  # fmt: skip

NOT_NEGATIVE = (
    "train.warmup_steps", "train.weight_decay", "train.max_grad_norm", "train.moe_balancing_coef", "rollout.top_k",
    "rollout.max_restarts",
    "rollout.validation.temperature", "rollout.validation.top_k", "algorithm.clip_low", "algorithm.clip_high",
    "algorithm.clip_dual", "algorithm.kl_coef", "data.validation_size", "checkpoint.every", "checkpoint.keep",
    "validate_every", "logging.samples", "reward.timeout_budget_seconds",
)  # fmt: skip


#: Above 0, up to 1.
SHARES = ("rollout.gpu_memory_utilization", "rollout.top_p", "rollout.validation.top_p")


def value_of(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node


def is_separate(rollout: RolloutConfig) -> bool:
    """Whether the rollout engine runs in processes of its own."""
    return rollout.engine == "sglang" or rollout.process == "separate"


def check_values(config: Config) -> Iterator[str]:
    """What is wrong with values by themselves. A comparison with NaN is false, so each is one that must hold."""
    for path, allowed in CHOICES.items():
        if (value := value_of(config, path)) not in allowed:
            yield f"{path}={value}: must be one of {' | '.join(allowed)}"
    for path in POSITIVE:
        if not (value := value_of(config, path)) > 0:
            yield f"{path}={value}: must be greater than 0"
    for path in NOT_NEGATIVE:
        if not (value := value_of(config, path)) >= 0:
            yield f"{path}={value}: must be 0 or greater"
    for path in SHARES:
        if not 0 < (value := value_of(config, path)) <= 1:
            yield f"{path}={value}: must be in (0, 1]"
    for path in ("train.beta1", "train.beta2", "train.min_lr_ratio"):
        if not 0 <= (value := value_of(config, path)) <= 1:
            yield f"{path}={value}: must be in [0, 1]"
    if config.rollout.sleep_level not in (0, 1, 2):
        yield f"rollout.sleep_level={config.rollout.sleep_level}: must be 0, 1 or 2"
    if config.steps is not None and config.steps <= 0:
        yield f"steps={config.steps}: must be greater than 0, or null for epochs={config.epochs}"
