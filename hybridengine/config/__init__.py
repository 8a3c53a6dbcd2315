"""The configuration schema: every key with its default, its one-line explanation and the values that it takes.

Hydra composes YAML groups over these dataclasses; :mod:`hybridengine.validate.contradictions` refuses what can't work.
Nothing below this module sees a DictConfig: parts of the program receive these dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DynamicSamplingConfig
from hybridengine.config.keys import as_texts, explanation, key, limits_of, text_of
from hybridengine.config.rewards import AuditTerm, MonitorConfig, RewardConfig, RewardModelConfig, RewardTerm

__all__ = [
    "AlgorithmConfig", "AuditTerm", "CheckpointConfig", "Config", "CorrectionConfig", "CriticConfig", "DataConfig",
    "DistributedConfig", "DynamicSamplingConfig", "LoggingConfig", "MemoryConfig", "ModelConfig", "MonitorConfig",
    "PlacementConfig", "RewardConfig", "RewardModelConfig", "RewardTerm", "RolloutConfig", "ScheduleConfig",
    "SyncConfig", "TERMS", "TrainConfig", "ValidationSampling", "as_texts", "explanation", "key", "limits_of",
    "text_of", "walk",
]  # fmt: skip


@dataclass(kw_only=True)
class ModelConfig:
    path: str = key("???", "Hugging Face model directory, or 'embedded' for the small arithmetic model")
    tokenizer: str | None = key(None, "tokenizer directory; default: model.path")
    chat_template: str | None = key(None, "Jinja file that replaces the tokenizer's chat template")
    trust_remote_code: bool = key(False, "run model code that ships with the checkpoint")


@dataclass(kw_only=True)
class TrainConfig:
    engine: str = key("fsdp", "training engine", choices=["fsdp", "megatron"])
    tp: int = key(1, "Megatron: tensor-parallel size", gt=0)
    pp: int = key(1, "Megatron: pipeline stages; the job has world_size / (tp * pp) replicas", gt=0)
    ep: int = key(1, "Megatron: expert-parallel size, over replicas", gt=0)
    vpp: int = key(1, "Megatron: model chunks per pipeline stage (virtual pipeline)", gt=0)
    sequence_parallel: bool = key(False, "Megatron: cut activations between layers over the tensor-parallel ranks")
    transformer_engine: str = key(
        "auto",
        "Megatron: Transformer Engine's layers",
        choices={"auto": "on CUDA, in bfloat16, where installed", "true": "", "false": ""},
    )
    moe_balancing: str = key(
        "none",
        "balance between experts",
        choices={"none": "", "aux_loss": "Switch Transformer; costs a forward pass per optimizer step"},
        unlisted=("bias",),
    )
    moe_balancing_coef: float = key(1e-3, "weight of aux_loss, a sum over layers; 0 = only measure", ge=0)
    dtype: str = key(
        "float32",
        "compute dtype of forward and backward (master weights: float32)",
        choices=["float32", "bfloat16"],
    )
    lr: float = key(1e-6, "peak learning rate", gt=0)
    lr_schedule: str = key("constant", "after the warm-up", choices=["constant", "cosine", "linear"])
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", ge=0)
    min_lr_ratio: float = key(0.0, "final learning rate / peak, for cosine and linear", ge=0, le=1)
    weight_decay: float = key(0.0, "AdamW weight decay; norms and biases are not decayed", ge=0)
    beta1: float = key(0.9, "AdamW beta1", ge=0, lt=1)
    beta2: float = key(0.999, "AdamW beta2", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon", gt=0)
    max_grad_norm: float = key(1.0, "clip the global gradient norm to this; 0 = off", ge=0)
    max_tokens_per_micro_batch: int = key(16384, "token budget of one forward/backward on one rank", gt=0)
    packing: bool = key(True, "pack sequences without padding; false: right-padded rows")
    activation_checkpointing: bool = key(False, "recompute each decoder layer in the backward pass")
    reshard_after_forward: bool | None = key(
        None, "FSDP: free full weights after each layer's forward; default: when they exceed 2 GiB"
    )
    logprob_chunk_tokens: int = key(1024, "tokens per [chunk, vocabulary] block of logits", gt=0)
    shard_order: str = key("auto", "FSDP shard order", choices={"auto": "fewest reshard bytes", "rank": ""})


@dataclass(kw_only=True)
class ValidationSampling:
    n: int = key(1, "samples per validation prompt", gt=0)
    temperature: float = key(0.0, "0 = greedy", ge=0)
    top_p: float = key(1.0, "nucleus mass; 1 = off", gt=0, le=1)
    top_k: int = key(0, "0 = off", ge=0)
    min_p: float = key(0.0, "0 = off", ge=0, lt=1)
    max_tokens: int | None = key(None, "default: rollout.max_tokens", gt=0)


@dataclass(kw_only=True)
class RolloutConfig:
    engine: str = key(
        "vllm", "rollout engine: vllm | sglang | transformers, or your own as path.py:TRAITS or package.module:TRAITS"
    )
    process: str = key(
        "auto",
        "where the engine runs",
        choices={"auto": "", "same": "in the training processes", "separate": "in its own; sglang always is"},
    )
    max_restarts: int = key(2, "separate: times that a replica whose processes died is started again in one run", ge=0)
    tp: int = key(1, "tensor-parallel size; the job has world_size / tp replicas", gt=0)
    samples_per_prompt: int = key(8, "responses per prompt (the group size)", gt=0)
    max_tokens: int = key(256, "response tokens at most", gt=0)
    temperature: float = key(1.0, "sampling temperature", gt=0)
    top_p: float = key(1.0, "nucleus mass; 1 = off", gt=0, le=1)
    top_k: int = key(0, "0 = off", ge=0)
    min_p: float = key(0.0, "leave out tokens less likely than this share of the likeliest; 0 = off", ge=0, lt=1)
    stop: Any = key([], "texts that end a response, and stay in it; in validations too", texts=True)
    dtype: str = key("float32", "weights and KV cache of the engine", choices=["float32", "bfloat16"])
    max_model_len: int | None = key(None, "context length; default: data.max_prompt_tokens + max_tokens", gt=0)
    max_num_seqs: int = key(256, "sequences decoded together at most", gt=0)
    kv_cache_gib: float = key(1.0, "KV cache per rank on CPU, GiB", gt=0)
    gpu_memory_utilization: float = key(0.6, "share of GPU memory the engine may use", gt=0, le=1)
    enforce_eager: bool = key(False, "vllm, sglang: no CUDA graphs, no compilation")
    sampler: str = key(
        "auto",
        "vllm: who draws the tokens",
        choices={"auto": "seeded on a CPU, engine on a GPU", "seeded": "ours, faster on a CPU", "engine": "vLLM's own"},
    )
    work_stealing: bool = key(True, "colocated: groups beyond what fits at once go to whichever replica has room")
    prefix_caching: bool = key(True, "vllm, sglang: reuse the KV cache of shared prompt prefixes within one version")
    sleep_level: int = key(
        2,
        "colocated, between rollouts, what leaves the device beside the KV cache",
        choices={0: "nothing, nor the KV cache", 1: "weights to host; CPU: they stay", 2: "weights dropped"},
    )
    validation: ValidationSampling = field(default_factory=ValidationSampling)
    engine_kwargs: dict[str, Any] = key({}, "passed to the engine's constructor as they are")


@dataclass(kw_only=True)
class SyncConfig:
    method: str = key(
        "auto",
        "how weights get from training to rollout; auto and pull everywhere, collective and gather colocated, the "
        "others disaggregated",
        choices=["auto", "pull", "collective", "gather", "broadcast", "delta", "checkpoint"],
    )
    bucket_mib: int = key(64, "staging memory of a sync at most, MiB", gt=0)
    verify: bool = key(True, "fingerprint every parameter after every sync")


@dataclass(kw_only=True)
class ParityConfig:
    """Rollout engine, trainer and transformers scoring the same tokens; see docs/engines.md."""

    probe: str = key(
        "refuse",
        "after the first sync, score a few sequences on every side; a difference that rounding does not explain",
        choices={"refuse": "ends the run", "warn": "", "off": "no probe"},
    )
    tolerance: float | None = key(
        None,
        "largest |difference| of a token's log-probability; default: 0.001 in float32 (0.02 on a GPU), 0.1 as a mean "
        "in bfloat16",
        gt=0,
    )
    transformers: str = key(
        "auto",
        "score with plain transformers, too",
        choices={"auto": "where that takes seconds", "true": "", "false": ""},
    )
    step_warn: float | None = key(0.1, "warn at a step whose mean |difference| of log-probabilities is above", gt=0)
    step_stop: float | None = key(1.0, "save and end the run, with status 4, at the second such step in a row", gt=0)


@dataclass(kw_only=True)
class MemoryConfig:
    offload_optimizer: bool = key(True, "colocated: optimizer state leaves the device between optimizer steps")
    offload_weights: bool = key(True, "colocated: training weights and reference model leave the device while not used")
    offload_dir: str | None = key(None, "on CPU: directory on a disk where they wait; without one they stay in memory")


@dataclass(kw_only=True)
class DataConfig:
    train: Any = key(
        "???",
        "file.jsonl | file.json (an array) | file.parquet | a list or pattern of files | saved datasets directory | "
        "Hub snapshot directory | reasoning_gym:<task> | arithmetic",
        texts=True,
    )
    validation: Any = key(None, "same forms; default: held out of data.train", texts=True)
    subset: str | None = key(None, "which subset, of a Hub snapshot that has several")
    validation_size: int = key(128, "validation prompts at most (held out of train when validation is not given)", ge=0)
    size: int = key(10000, "rows to make, for procedural sources", gt=0)
    kwargs: dict[str, Any] = key({}, "options of a procedural source, such as reasoning_gym task parameters")
    prompt_key: str = key("prompt", "column with the prompt: a string, or chat messages; nested: a.b")
    answer_key: str = key("answer", "column with the ground truth; nested: reward_model.ground_truth")
    system_prompt: str | None = key(None, "system message put before each chat prompt")
    chat: str = key(
        "auto", "apply the chat template", choices={"auto": "when the tokenizer has one", "true": "", "false": ""}
    )
    chat_template_kwargs: dict[str, Any] = key({}, "arguments of the chat template, such as enable_thinking: false")
    max_prompt_tokens: int = key(512, "longest prompt", gt=0)
    overlong: str = key("drop", "longer prompts", choices={"drop": "", "truncate": "keeps the end", "error": ""})
    prompts_per_step: int = key(64, "prompts per rollout, over all ranks", gt=0)
    shuffle: bool = key(True, "new order each epoch, a function of seed and epoch")


@dataclass(kw_only=True)
class CheckpointConfig:
    minutes: float = key(30.0, "minutes between checkpoints, at the end of a step; 0 = by steps only", ge=0)
    every: int = key(0, "steps between checkpoints; 0 = by time only", ge=0)
    at_end: bool = key(True, "also at the end of the run, and when it is interrupted")
    keep: int = key(2, "newest checkpoints kept; 0 = all", ge=0)
    best: str | None = key(
        None,
        "metric, such as validation/accuracy: the checkpoint of its best value is kept, too; min:NAME: least",
    )
    resume: str = key("auto", "auto (newest in output_dir) | never | checkpoint directory")
    export: bool = key(True, "write a Hugging Face model at the end")


@dataclass(kw_only=True)
class LoggingConfig:
    console: bool = key(True, "progress bar and one line per step")
    jsonl: bool = key(True, "metrics.jsonl in output_dir")
    tensorboard: bool = key(True, "TensorBoard events in output_dir/tensorboard")
    wandb_project: str | None = key(None, "Weights & Biases project; needs the wandb package")
    verbose: bool = key(False, "set-up in full on the console: shards, transfers, memory; run.log has it in any case")
    samples: int = key(2, "responses printed at each validation, right and wrong ones by turns", ge=0)
    completions: int = key(
        0, "steps between rollouts that are kept in output_dir/completions, validations too; 0 = none", ge=0
    )
    plot: bool = key(True, "report.png at the end")
    report: bool = key(True, "report.html at the end, after a failure too")


@dataclass(kw_only=True)
class PlacementConfig:
    name: str = key(
        "colocated",
        "who does what",
        choices={"colocated": "every rank trains and generates", "disaggregated": "a pool of ranks for each"},
    )
    rollout_ranks: int = key(1, "disaggregated: ranks that generate; the others train", gt=0)


@dataclass(kw_only=True)
class ScheduleConfig:
    name: str = key(
        "sync",
        "the last two need placement=disaggregated",
        choices=["sync", "partial", "one_step_off", "async"],
    )
    over_provision: float = key(1.5, "partial: groups in flight, as a multiple of data.prompts_per_step", ge=1)
    staleness: int = key(4, "async: training steps between a sample's first policy and its training at most", ge=0)
    order: str = key(
        "completion",
        "async: which groups make a batch",
        choices={
            "completion": "the oldest of those that are complete",
            "start": "the oldest of all, waited for: long answers are not overtaken",
        },
    )


@dataclass(kw_only=True)
class DistributedConfig:
    timeout_seconds: float = key(600.0, "limit of one collective; the error names the phase", gt=0)
    hang_report: bool = key(
        True,
        "write where every rank stands (hang/ in output_dir, a table on rank 0) at SIGUSR1 and when a phase takes five "
        "times its longest run so far, at least 30 s and at most half of timeout_seconds",
    )


#: Dictionaries whose values have a schema of their own.
TERMS: dict[str, type] = {"reward.terms": RewardTerm, "reward.audit": AuditTerm}


@dataclass(kw_only=True)
class Config:
    name: str = key("run", "name of the run")
    output_dir: str = key("outputs/${name}", "everything the run writes")
    seed: int = key(1, "base seed of data order, sampling and initialisation", ge=0)
    steps: int | None = key(None, "rollout/train steps; default: from epochs", gt=0)
    epochs: int = key(1, "passes over the data, when steps is not given", gt=0)
    validate_every: int = key(10, "steps between validations; 0 = none at all, otherwise also before and after", ge=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@functools.cache
def walk(schema: type = Config, prefix: str = "") -> tuple[tuple[str, dataclasses.Field[Any]], ...]:
    """Every leaf of the schema as (dotted path, field), depth first in order of definition."""
    hints = typing.get_type_hints(schema)
    leaves: list[tuple[str, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(schema):
        path = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hints[item.name]):
            leaves += walk(hints[item.name], f"{path}.")
        else:
            leaves.append((path, item))
    return tuple(leaves)
