"""Contradictions in the configuration, found in seconds and before any engine starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridengine.algorithms.correction import correction_of
from hybridengine.compose import ConfigError
from hybridengine.config import Config, RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.memory.stores import in_memory
from hybridengine.reshard.naming.vllm import mlp_width, padded_vocab, tensor_parallel_fits

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
    "data.chat": ("auto", "true", "false"),
    "data.overlong": ("drop", "truncate", "error"),
    "placement.name": ("colocated", "disaggregated"),
    "schedule.name": ("sync", "partial", "one_step_off", "async"),
}

#: vllm/v1/attention/backends/cpu_attn.py; a test compares.
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

POSITIVE = (
    "train.tp", "train.pp", "train.ep", "train.vpp",
    "train.lr", "train.eps", "train.max_tokens_per_micro_batch", "train.logprob_chunk_tokens", "rollout.tp",
    "rollout.samples_per_prompt", "rollout.max_tokens", "rollout.temperature", "rollout.max_num_seqs",
    "rollout.kv_cache_gib", "rollout.gpu_memory_utilization", "rollout.validation.n", "handoff.bucket_mib",
    "algorithm.epochs", "algorithm.mini_batches", "algorithm.correction_cap", "reward.timeout_seconds",
    "reward.workers", "data.size", "data.max_prompt_tokens", "data.prompts_per_step", "epochs",
    "distributed.timeout_seconds",
)  # fmt: skip

NOT_NEGATIVE = (
    "train.warmup_steps", "train.weight_decay", "train.max_grad_norm", "train.moe_balancing_coef", "rollout.top_k",
    "rollout.max_restarts",
    "rollout.validation.temperature", "rollout.validation.top_k", "algorithm.clip_low", "algorithm.clip_high",
    "algorithm.clip_dual", "algorithm.kl_coef", "data.validation_size", "checkpoint.every", "checkpoint.keep",
    "validate_every", "logging.samples",
)  # fmt: skip


def value_of(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node


def is_separate(rollout: RolloutConfig) -> bool:
    """Whether the rollout engine runs in processes of its own."""
    return rollout.engine == "sglang" or rollout.process == "separate"


def validate(config: Config, world: World) -> None:
    """Refuse a configuration that can't work.

    Raises:
        ConfigError: every problem found, one per line, each naming the key, its value and what would be right.
    """
    problems = [*_values(config), *_batches(config, world), *_objective(config), *_environment(config, world)]
    problems += _processes(config, world)
    problems += [*_schedule(config, world), *_layout(config, world)]
    problems += [*_memory(config, world), *_model(config, world)]
    if problems:
        raise ConfigError("\n".join(problems))


def _values(config: Config) -> Iterator[str]:
    for path, allowed in CHOICES.items():
        if (value := value_of(config, path)) not in allowed:
            yield f"{path}={value}: must be one of {' | '.join(allowed)}"
    for path in POSITIVE:
        if (value := value_of(config, path)) <= 0:
            yield f"{path}={value}: must be greater than 0"
    for path in NOT_NEGATIVE:
        if (value := value_of(config, path)) < 0:
            yield f"{path}={value}: must be 0 or greater"
    for path in ("rollout.top_p", "rollout.validation.top_p"):
        if not 0 < (value := value_of(config, path)) <= 1:
            yield f"{path}={value}: must be in (0, 1]"
    for path in ("train.beta1", "train.beta2", "train.min_lr_ratio"):
        if not 0 <= (value := value_of(config, path)) <= 1:
            yield f"{path}={value}: must be in [0, 1]"
    if config.rollout.sleep_level not in (0, 1, 2):
        yield f"rollout.sleep_level={config.rollout.sleep_level}: must be 0, 1 or 2"
    if config.steps is not None and config.steps <= 0:
        yield f"steps={config.steps}: must be greater than 0, or null for epochs={config.epochs}"


def _batches(config: Config, world: World) -> Iterator[str]:
    rollout, data, algorithm = config.rollout, config.data, config.algorithm
    ranks, what = world.size, "the world size"
    if config.placement.name == "disaggregated":
        ranks, what = config.placement.rollout_ranks, "placement.rollout_ranks ="
    if rollout.tp > 0 and ranks > 0 and ranks % rollout.tp:
        fits = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
        yield f"rollout.tp={rollout.tp}: must divide {what} {ranks}, such as {fits}"
    if rollout.engine == "transformers" and rollout.tp != 1:
        yield f"rollout.tp={rollout.tp}: the transformers engine has no tensor parallelism; use rollout.tp=1"
    replicas = max(1, ranks // max(1, rollout.tp))
    if data.prompts_per_step < replicas:
        yield f"data.prompts_per_step={data.prompts_per_step}: fewer prompts than the {replicas} rollout replicas"
    if algorithm.mini_batches > 0 and data.prompts_per_step % algorithm.mini_batches:
        yield (
            f"algorithm.mini_batches={algorithm.mini_batches}: must divide "
            f"data.prompts_per_step={data.prompts_per_step}, so that every optimizer step sees as many prompts"
        )
    longest = data.max_prompt_tokens + rollout.max_tokens
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"rollout.max_model_len={rollout.max_model_len}: shorter than data.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}"
        )
    if 0 < config.train.max_tokens_per_micro_batch < longest:
        yield (
            f"train.max_tokens_per_micro_batch={config.train.max_tokens_per_micro_batch}: one sequence can have "
            f"data.max_prompt_tokens + rollout.max_tokens = {longest} tokens; allow at least that"
        )
    if config.rollout.validation.n > 1 and config.rollout.validation.temperature == 0:
        yield (
            f"rollout.validation.n={config.rollout.validation.n}: greedy samples are all equal; "
            "set rollout.validation.temperature above 0 or n=1"
        )


def _without_effect(config: Config, other: str, **defaults: Any) -> Iterator[str]:
    """Keys that only the ``other`` training engine reads."""
    engine = config.train.engine
    for name, default in defaults.items():
        if (value := getattr(config.train, name)) != default:
            yield f"train.{name}={value}: has no effect with train.engine={engine}; use train={other}, or {default}"


def _layout(config: Config, world: World) -> Iterator[str]:
    """Keys of the other training engine, and degrees of parallelism that do not fit each other or the job."""
    train = config.train
    if train.engine == "fsdp":
        only_megatron = {"tp": 1, "pp": 1, "ep": 1, "vpp": 1, "sequence_parallel": False, "transformer_engine": "auto"}
        yield from _without_effect(config, "megatron", **only_megatron)
        return
    yield from _without_effect(config, "fsdp", reshard_after_forward=None, shard_order="auto")
    if importlib.util.find_spec("megatron") is None:
        yield "train.engine=megatron: megatron-core is not installed; pip install 'hybridengine[megatron]'"
    elif train.transformer_engine == "true":
        from hybridengine.engines.train.megatron.kernels import choose

        try:
            choose(train, is_cuda=world.is_cuda)
        except ValueError as error:
            yield str(error)
    if min(train.tp, train.pp, train.ep, train.vpp) < 1:
        return
    ranks = world.size - (config.placement.rollout_ranks if config.placement.name == "disaggregated" else 0)
    if ranks % (train.tp * train.pp):
        yield (
            f"train.tp={train.tp} train.pp={train.pp}: one model takes {train.tp * train.pp} ranks, which must divide "
            f"the {ranks} training rank(s)"
        )
    elif (ranks // (train.tp * train.pp)) % train.ep:
        yield (
            f"train.ep={train.ep}: must divide the {ranks // (train.tp * train.pp)} replica(s) that {ranks} training "
            f"rank(s) form at train.tp={train.tp} train.pp={train.pp}"
        )
    if train.vpp > 1 and train.pp == 1:
        yield f"train.vpp={train.vpp}: chunks of pipeline stages need train.pp of 2 or more"
    if train.vpp > 1 and not train.packing:
        yield f"train.vpp={train.vpp}: stages exchange messages of one size, so train.packing must be true"
    if train.sequence_parallel and train.tp == 1:
        yield "train.sequence_parallel=true: needs train.tp of 2 or more"


def _processes(config: Config, world: World) -> Iterator[str]:
    rollout = config.rollout
    if rollout.process == "same" and rollout.engine == "sglang":
        yield "rollout.process=same: SGLang runs in processes of its own; use auto or separate"
    if rollout.process == "separate" and rollout.engine == "transformers":
        yield "rollout.process=separate: the transformers engine has no process of its own; use auto or same"
    if not is_separate(rollout):
        return
    if world.is_cuda and rollout.sleep_level > 0 and config.placement.name == "colocated":
        yield (
            f"rollout.sleep_level={rollout.sleep_level}: weights that another process maps over CUDA IPC can't leave "
            "the GPU; set rollout.sleep_level=0, or rollout=vllm rollout.process=same"
        )
    if rollout.engine == "sglang":
        from hybridengine.engines.separate.launch import interpreter

        try:
            interpreter(rollout)
        except ValueError as error:
            yield str(error)


def _objective(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.samples_per_prompt == 1:
        yield (
            f"rollout.samples_per_prompt=1: algorithm.advantage={algorithm.advantage} compares the samples of one "
            "prompt; set rollout.samples_per_prompt to 2 or more"
        )
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    compares = (
        correction_of(config) != "none"
        or algorithm.old_logprobs == "rollout"
        or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")
    )
    if truncated and compares:
        which = f"rollout.top_p={rollout.top_p}" if rollout.top_p < 1 else f"rollout.top_k={rollout.top_k}"
        yield (
            f"{which}: the trainer scores the full distribution, so ratios against the truncated rollout "
            "distribution (algorithm.correction, algorithm.old_logprobs=rollout, algorithm.kl_in=reward) are biased; "
            "set rollout.top_p=1 rollout.top_k=0, or leave those at none, auto and loss"
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0 and algorithm.kl_estimator == "k2":
        yield "algorithm.kl_estimator=k2: squared log-ratio is a loss, not a reward; use k1 or k3 with kl_in=reward"
    if algorithm.clip_dual and algorithm.clip_dual <= 1:
        yield f"algorithm.clip_dual={algorithm.clip_dual}: must be above 1, or 0 for off"
    if not config.reward.fn and not config.reward.terms:
        yield (
            "reward.fn=null: no reward; set reward.fn to exact_match, math, path.py:function or module:function, "
            "or reward.terms"
        )


def _environment(config: Config, world: World) -> Iterator[str]:
    sleeps, exports = (
        config.rollout.sleep_level > 0,
        world.is_cuda and world.size > 1 and config.handoff.method == "pull",
    )
    if sleeps or exports:
        remedies = ["rollout.sleep_level=0"] * sleeps + ["handoff.method=collective"] * exports
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
                yield (
                    f"{name}={os.environ[name]}: expandable segments can't be put to sleep or exported over CUDA IPC; "
                    f"unset it or set {' '.join(remedies)}"
                )
    if config.logging.wandb_project is not None:
        if importlib.util.find_spec("wandb") is None:
            yield (
                f"logging.wandb_project={config.logging.wandb_project}: the wandb package is not installed; "
                "pip install wandb, or leave it null"
            )


def _schedule(config: Config, world: World) -> Iterator[str]:
    placement, schedule, method = config.placement, config.schedule, config.handoff.method
    if schedule.over_provision < 1:
        yield f"schedule.over_provision={schedule.over_provision}: must be 1 or more"
    if schedule.staleness < 0:
        yield f"schedule.staleness={schedule.staleness}: must be 0 or more"
    if placement.name == "colocated":
        if schedule.name in ("one_step_off", "async"):
            yield (
                f"schedule.name={schedule.name}: generates while it trains, which ranks that do both can't; "
                "use placement=disaggregated, or schedule=sync or partial"
            )
        if method in ("broadcast", "delta", "checkpoint"):
            yield f"handoff.method={method}: between pools of ranks; use placement=disaggregated, or auto"
        return
    if not 1 <= placement.rollout_ranks < world.size:
        yield (
            f"placement.rollout_ranks={placement.rollout_ranks}: must leave ranks for training, 1 to "
            f"{world.size - 1} of {world.size}"
            + ("; start the job with torchrun --nproc-per-node 2 or more" if world.size == 1 else "")
        )
    if method in ("collective", "gather"):
        yield f"handoff.method={method}: colocated only; between pools: auto, pull, broadcast, delta, checkpoint"
    if config.train.shard_order != "auto":
        yield f"train.shard_order={config.train.shard_order}: shards can't nest in another pool's; leave it at auto"


def _memory(config: Config, world: World) -> Iterator[str]:
    memory = config.memory
    if memory.offload_dir is not None:
        path = Path(memory.offload_dir)
        if world.is_cuda:
            yield f"memory.offload_dir={path}: for CPU runs; GPU memory goes to host memory, leave it null"
        elif not path.is_dir():
            yield f"memory.offload_dir={path}: no such directory; give one on a disk, or leave it null"
        elif in_memory(path):
            yield f"memory.offload_dir={path}: that is memory itself (tmpfs); give a directory on a disk"
    apart = config.placement.name == "disaggregated"  # where nothing leaves
    if world.is_cuda and world.size > 1 and config.handoff.method == "pull" and memory.offload_weights and not apart:
        yield (
            "handoff.method=pull with memory.offload_weights=true: GPU memory that peers map can't leave the device; "
            "set memory.offload_weights=false, or handoff.method=collective"
        )


def _model(config: Config, world: World) -> Iterator[str]:
    if config.model.chat_template is not None and not Path(config.model.chat_template).is_file():
        yield f"model.chat_template={config.model.chat_template}: no such file"
    if config.model.path == "embedded":
        return  # made on demand, its shape divides by every tensor-parallel size up to its KV heads
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        what = "no config.json in it" if path.is_dir() else "no such directory"
        yield f"model.path={config.model.path}: {what}; give a Hugging Face model directory, or 'embedded'"
        return
    if not any(path.glob("*.safetensors")):
        yield f"model.path={config.model.path}: no *.safetensors weights in it; convert the checkpoint to safetensors"
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    heads = int(getattr(hf_config, "num_attention_heads", None) or 0)
    kv_heads = int(getattr(hf_config, "num_key_value_heads", None) or heads)
    tp = config.rollout.tp
    if heads and tp > 0 and not tensor_parallel_fits(hf_config, tp):
        yield (
            f"rollout.tp={tp}: must divide the model's {heads} attention heads (and fit its {kv_heads} KV heads), its "
            f"MLP width {mlp_width(hf_config)} and its vocabulary, padded to {padded_vocab(hf_config.vocab_size)}; "
            f"possible: {[size for size in range(1, heads + 1) if tensor_parallel_fits(hf_config, size)]}"
        )
    head_dim = getattr(hf_config, "head_dim", None) or (hf_config.hidden_size // heads if heads else 0)
    if config.rollout.engine == "vllm" and not world.is_cuda and head_dim not in VLLM_CPU_HEAD_SIZES:
        yield (
            f"model.path={config.model.path}: vLLM's CPU attention has no kernel for heads of {head_dim}, only for "
            f"{VLLM_CPU_HEAD_SIZES}; use rollout=transformers"
        )
    if config.train.moe_balancing != "none":
        from hybridengine.engines.train.balancing import check_balancing

        try:
            check_balancing(config.train, hf_config)
        except ValueError as error:
            yield str(error)
    if config.train.engine == "megatron":
        yield from _megatron_model(config, world, path, hf_config)
    limit = getattr(hf_config, "max_position_embeddings", None)
    longest = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens
    if limit and longest > limit:
        yield (
            f"data.max_prompt_tokens + rollout.max_tokens = {longest}: the model's context is {limit} tokens "
            "(max_position_embeddings)"
        )


def _megatron_model(config: Config, world: World, path: Path, hf_config: Any) -> Iterator[str]:
    """What the engine itself would refuse: an unmapped architecture, degrees that do not divide, other tensors."""
    from hybridengine.engines.train.loading import SafetensorsSource
    from hybridengine.engines.train.megatron.degrees import layout_of
    from hybridengine.engines.train.megatron.families import check_model, mapped_decoder
    from hybridengine.engines.train.megatron.weights import check_tensors
    from hybridengine.reshard.naming import megatron_shard_map

    ranks = world.size - (config.placement.rollout_ranks if config.placement.name == "disaggregated" else 0)
    train = config.train
    wrong = min(train.tp, train.pp, train.ep, train.vpp) < 1 or [*_layout(config, world)]
    if wrong or not any(path.glob("*.safetensors")):
        return  # reported already
    try:
        layout = layout_of(config.train, mapped_decoder(hf_config), ranks)
        decoder = check_model(hf_config, layout, config.train)
        check_tensors(SafetensorsSource(path), megatron_shard_map(hf_config, layout), tied=decoder.tied)
    except ValueError as error:
        yield str(error)
