"""The configuration schema: every key, its default and its one-line explanation, and nothing else.

Hydra composes YAML groups over these dataclasses; :mod:`hybridengine.validate` refuses what can't work.
Nothing below this module sees a DictConfig: parts of the program receive these dataclasses.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


def key(default: Any, help: str) -> Any:
    """A field with a default and the explanation that ``--help`` and docs/config.md show."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class ModelConfig:
    path: str = key("???", "Hugging Face model directory, or 'embedded' for the small arithmetic model")
    tokenizer: str | None = key(None, "tokenizer directory; default: model.path")
    chat_template: str | None = key(None, "Jinja file that replaces the tokenizer's chat template")
    trust_remote_code: bool = key(False, "run model code that ships with the checkpoint")


@dataclass(kw_only=True)
class TrainConfig:
    engine: str = key("fsdp", "training engine: fsdp | megatron")
    tp: int = key(1, "Megatron: tensor-parallel size")
    pp: int = key(1, "Megatron: pipeline stages; the job has world_size / (tp * pp) replicas")
    ep: int = key(1, "Megatron: expert-parallel size, over replicas")
    vpp: int = key(1, "Megatron: model chunks per pipeline stage (virtual pipeline)")
    sequence_parallel: bool = key(False, "Megatron: cut activations between layers over the tensor-parallel ranks")
    transformer_engine: str = key(
        "auto", "Megatron: Transformer Engine's layers: auto (on CUDA, in bfloat16, where installed) | true | false"
    )
    moe_balancing: str = key(
        "none",
        "balance between experts: none | aux_loss (Switch Transformer; costs a forward pass per optimizer step)",
    )
    moe_balancing_coef: float = key(1e-3, "weight of aux_loss, a sum over layers; 0 = only measure")
    dtype: str = key("float32", "compute dtype of forward and backward: float32 | bfloat16 (master weights: float32)")
    lr: float = key(1e-6, "peak learning rate")
    lr_schedule: str = key("constant", "constant | cosine | linear, after the warm-up")
    warmup_steps: int = key(0, "optimizer steps of linear warm-up")
    min_lr_ratio: float = key(0.0, "final learning rate / peak, for cosine and linear")
    weight_decay: float = key(0.0, "AdamW weight decay; norms and biases are not decayed")
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.999, "AdamW beta2")
    eps: float = key(1e-8, "AdamW epsilon")
    max_grad_norm: float = key(1.0, "clip the global gradient norm to this; 0 = off")
    max_tokens_per_micro_batch: int = key(16384, "token budget of one forward/backward on one rank")
    packing: bool = key(True, "pack sequences without padding; false: right-padded rows")
    activation_checkpointing: bool = key(False, "recompute each decoder layer in the backward pass")
    reshard_after_forward: bool | None = key(
        None, "FSDP: free full weights after each layer's forward; default: when they exceed 2 GiB"
    )
    logprob_chunk_tokens: int = key(1024, "tokens per [chunk, vocabulary] block of logits")
    shard_order: str = key("auto", "FSDP shard order: auto (fewest reshard bytes) | rank")


@dataclass(kw_only=True)
class ValidationSampling:
    n: int = key(1, "samples per validation prompt")
    temperature: float = key(0.0, "0 = greedy")
    top_p: float = key(1.0, "nucleus mass; 1 = off")
    top_k: int = key(0, "0 = off")
    max_tokens: int | None = key(None, "default: rollout.max_tokens")


@dataclass(kw_only=True)
class RolloutConfig:
    engine: str = key("vllm", "rollout engine: vllm | sglang | transformers")
    process: str = key("auto", "auto | same: in the training processes | separate: in its own (sglang always is)")
    max_restarts: int = key(2, "separate: times that a replica whose processes died is started again in one run")
    tp: int = key(1, "tensor-parallel size; the job has world_size / tp replicas")
    samples_per_prompt: int = key(8, "responses per prompt (the group size)")
    max_tokens: int = key(256, "response tokens at most")
    temperature: float = key(1.0, "sampling temperature")
    top_p: float = key(1.0, "nucleus mass; 1 = off")
    top_k: int = key(0, "0 = off")
    dtype: str = key("float32", "weights and KV cache of the engine: float32 | bfloat16")
    max_model_len: int | None = key(None, "context length; default: data.max_prompt_tokens + max_tokens")
    max_num_seqs: int = key(256, "sequences decoded together at most")
    kv_cache_gib: float = key(1.0, "KV cache per rank on CPU, GiB")
    gpu_memory_utilization: float = key(0.6, "share of GPU memory the engine may use")
    enforce_eager: bool = key(False, "vllm, sglang: no CUDA graphs, no compilation")
    work_stealing: bool = key(True, "colocated: groups beyond what fits at once go to whichever replica has room")
    prefix_caching: bool = key(True, "vllm, sglang: reuse the KV cache of shared prompt prefixes within one version")
    sleep_level: int = key(
        2,
        "colocated, between rollouts: 0 stay awake, 1 weights to host (CPU: they stay), 2 weights dropped; "
        "KV cache dropped with 1 and 2",
    )
    validation: ValidationSampling = field(default_factory=ValidationSampling)
    engine_kwargs: dict[str, Any] = key({}, "passed to the engine's constructor as they are")


@dataclass(kw_only=True)
class HandoffConfig:
    method: str = key(
        "auto", "weights: auto | pull; colocated also collective | gather, disaggregated broadcast | delta | checkpoint"
    )
    bucket_mib: int = key(64, "staging memory of a sync at most, MiB")
    verify: bool = key(True, "fingerprint every parameter after every sync")


@dataclass(kw_only=True)
class MemoryConfig:
    offload_optimizer: bool = key(True, "colocated: optimizer state leaves the device between optimizer steps")
    offload_weights: bool = key(True, "colocated: training weights and reference model leave the device while not used")
    offload_dir: str | None = key(None, "on CPU: directory on a disk where they wait; without one they stay in memory")


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: str = key("grpo", "algorithm: grpo")
    advantage: str = key("group_std", "baseline: group_std (GRPO) | group_mean (Dr. GRPO) | leave_one_out (RLOO)")
    clip_low: float = key(0.2, "ratio clipped below 1 - clip_low")
    clip_high: float = key(0.2, "ratio clipped above 1 + clip_high (larger than clip_low: clip-higher, DAPO)")
    clip_dual: float = key(0.0, "dual-clip bound for negative advantages; 0 = off")
    loss_aggregation: str = key("token-mean", "token-mean | seq-mean-token-mean | seq-mean-token-sum | constant-length")
    constant_length: int | None = key(None, "divisor of constant-length; default: rollout.max_tokens")
    kl_coef: float = key(0.0, "weight of the KL term against the frozen reference; 0 = no reference model")
    kl_estimator: str = key("k3", "k1 | k2 | k3")
    kl_in: str = key("loss", "loss | reward")
    entropy_coef: float = key(0.0, "entropy bonus")
    epochs: int = key(1, "passes over each rollout")
    mini_batches: int = key(1, "optimizer steps per pass")
    drop_zero_variance: bool = key(False, "leave groups whose rewards are all equal out of the loss and its count")
    mask_truncated: bool = key(False, "leave responses cut at max_tokens out of the loss")
    old_logprobs: str = key("auto", "auto | recompute | rollout: where the ratio's denominator comes from")
    correction: str = key(
        "auto",
        "rollout other than policy: none | tis (truncated importance weights) | tis_sequence | auto (by schedule)",
    )
    correction_cap: float = key(2.0, "upper bound of the importance weight")


@dataclass(kw_only=True)
class RewardTerm:
    fn: str = key(
        "???",
        "exact_match | regex | format | math | math_verify | code | reasoning_gym | path.py:function | module:function",
    )
    weight: float = key(1.0, "weight in the total")
    kwargs: dict[str, Any] = key({}, "keyword arguments of the function")
    isolate: bool | None = key(None, "run it in worker processes; default: reward.isolate")
    batch: bool | None = key(None, "it takes lists; default: told by its parameters' names")
    on_error: str | None = key(None, "auto | raise | zero; default: reward.on_error")
    timeout_seconds: float | None = key(None, "time limit of one call; default: reward.timeout_seconds")


@dataclass(kw_only=True)
class AuditTerm:
    fn: str = key("???", "as reward.fn")
    kwargs: dict[str, Any] = key({}, "keyword arguments of the function")
    share: float = key(0.1, "share of the samples that it scores")
    isolate: bool | None = key(None, "run it in worker processes; default: reward.isolate")


@dataclass(kw_only=True)
class RewardConfig:
    fn: str | None = key(None, "one reward function: a built-in name, path.py:function or module:function")
    kwargs: dict[str, Any] = key({}, "keyword arguments of reward.fn")
    #: values are RewardTerm once composed; open here so that ``reward.terms.a.fn=math`` works on the command line
    terms: dict[str, Any] = key(
        {},
        "several: reward.terms.<name>.{fn, weight, kwargs, isolate, batch, on_error, timeout_seconds}; "
        "summed with their weights",
    )
    #: values are AuditTerm once composed
    audit: dict[str, Any] = key(
        {}, "second opinions, never trained on: reward.audit.<name>.{fn, kwargs, share, isolate}; see docs/rewards.md"
    )
    isolate: bool = key(
        False, "run functions of your own in worker processes: they can be stopped, and don't slow generation down"
    )
    on_error: str = key(
        "auto",
        "what a failing function costs: raise (the run) | zero (the sample's score) | auto (raise, but zero where an "
        "isolated one takes too long or its process dies)",
    )
    timeout_seconds: float = key(10.0, "time limit of one scoring call")
    timeout_budget_seconds: float = key(
        60.0, "what isolated calls that reach their limit may use up per rollout and rank; then each gets 0.5 s"
    )
    workers: int = key(4, "calls at the same time on each rank: threads, with a process each for isolated functions")
    memory_gib: float = key(4.0, "private memory of one worker process")
    skip_special_tokens: bool = key(True, "leave special tokens out of the response's text (never seen: the end token)")


@dataclass(kw_only=True)
class MonitorConfig:
    rules: dict[str, Any] = key(
        {},
        "alarms: monitor.rules.<name>='completions/clipped_ratio > 0.5 for 3'; null switches a default one off; see "
        "docs/rewards.md",
    )
    defaults: bool = key(True, "also watch for what usually goes wrong")
    action: str = key("warn", "at an alarm: warn | stop (save, and exit with status 4)")


@dataclass(kw_only=True)
class DataConfig:
    train: str = key("???", "file.jsonl | file.parquet | saved datasets directory | reasoning_gym:<task> | arithmetic")
    validation: str | None = key(None, "same forms; default: held out of data.train")
    validation_size: int = key(128, "validation prompts at most (held out of train when validation is not given)")
    size: int = key(10000, "rows to make, for procedural sources")
    kwargs: dict[str, Any] = key({}, "options of a procedural source, such as reasoning_gym task parameters")
    prompt_key: str = key("prompt", "column with the prompt: a string, or chat messages")
    answer_key: str = key("answer", "column with the ground truth")
    system_prompt: str | None = key(None, "system message put before each chat prompt")
    chat: str = key("auto", "apply the chat template: auto (when the tokenizer has one) | true | false")
    max_prompt_tokens: int = key(512, "longest prompt")
    overlong: str = key("drop", "longer prompts: drop | truncate (keeps the end) | error")
    prompts_per_step: int = key(64, "prompts per rollout, over all ranks")
    shuffle: bool = key(True, "new order each epoch, a function of seed and epoch")


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int = key(
        0, "steps between checkpoints; 0 = only at the end, when interrupted, and when the rollout side is lost"
    )
    keep: int = key(2, "newest checkpoints kept; 0 = all")
    resume: str = key("auto", "auto (newest in output_dir) | never | checkpoint directory")
    export: bool = key(True, "write a Hugging Face model at the end")


@dataclass(kw_only=True)
class LoggingConfig:
    console: bool = key(True, "progress bar and one line per step")
    jsonl: bool = key(True, "metrics.jsonl in output_dir")
    tensorboard: bool = key(True, "TensorBoard events in output_dir/tensorboard")
    wandb_project: str | None = key(None, "Weights & Biases project; needs the wandb package")
    samples: int = key(2, "responses printed at each validation")
    plot: bool = key(True, "report.png at the end")


@dataclass(kw_only=True)
class PlacementConfig:
    name: str = key("colocated", "colocated (time-share every rank) | disaggregated (a pool of ranks for each)")
    rollout_ranks: int = key(1, "disaggregated: ranks that generate; the others train")


@dataclass(kw_only=True)
class ScheduleConfig:
    name: str = key("sync", "sync | partial | one_step_off | async; the last two need placement=disaggregated")
    over_provision: float = key(1.5, "partial: groups in flight, as a multiple of data.prompts_per_step")
    staleness: int = key(4, "async: training steps between a sample's first policy and its training at most")


@dataclass(kw_only=True)
class DistributedConfig:
    timeout_seconds: float = key(600.0, "limit of one collective; the error names the phase")


@dataclass(kw_only=True)
class Config:
    name: str = key("run", "name of the run")
    output_dir: str = key("outputs/${name}", "everything the run writes")
    seed: int = key(1, "base seed of data order, sampling and initialisation")
    steps: int | None = key(None, "rollout/train steps; default: from epochs")
    epochs: int = key(1, "passes over the data, when steps is not given")
    validate_every: int = key(10, "steps between validations; 0 = none at all, otherwise also before and after")
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def walk(schema: type = Config, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any]]]:
    """Every leaf of the schema as (dotted path, field), depth first in order of definition."""
    import typing

    hints = typing.get_type_hints(schema)
    leaves: list[tuple[str, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(schema):
        path = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hints[item.name]):
            leaves += walk(hints[item.name], f"{path}.")
        else:
            leaves.append((path, item))
    return leaves
