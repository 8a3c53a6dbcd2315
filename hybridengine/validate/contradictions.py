"""Contradictions in the configuration, found in seconds and before any engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.algorithms.validate import algorithm_problems
from hybridengine.config import Config
from hybridengine.config.compose import ConfigError
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.traits import runs_in_own_processes, traits_of
from hybridengine.rewards.model import model_problem
from hybridengine.validate.here import check_here
from hybridengine.validate.model import check_model
from hybridengine.validate.values import check_values


def validate(config: Config, world: World) -> None:
    """Refuse a configuration that can't work.

    Raises:
        ConfigError: every problem found, one per line, each naming the key, its value and what would be right.
    """
    problems = [*contradictions(config, world), *_reward(config), *_monitor(config), *check_here(config, world)]
    train = config.train
    layout_fits = min(train.tp, train.pp, train.ep, train.vpp) > 0 and not [*_layout(config, world)]
    problems += check_model(config, world, layout_fits=layout_fits)
    if problems:
        raise ConfigError("\n".join(problems))


def contradictions(config: Config, world: World) -> list[str]:
    """What is wrong whatever the model, the data and the machine at hand: of a World that need not be this one."""
    found = [*check_values(config)]
    if not any(problem.startswith("algorithm.") for problem in found):
        found += algorithm_problems(config)
    try:
        traits_of(config.rollout.engine)
    except ValueError as error:
        return [*found, str(error)]  # what follows asks what the engine is like
    for check in (_batches, _processes, _schedule, _layout, _pull):
        found += check(config, world)
    return found


def _batches(config: Config, world: World) -> Iterator[str]:
    rollout, data, algorithm = config.rollout, config.data, config.algorithm
    ranks, what = world.size, "the world size"
    if config.placement.name == "disaggregated":
        ranks, what = config.placement.rollout_ranks, "placement.rollout_ranks ="
    if rollout.tp > 0 and ranks > 0 and ranks % rollout.tp:
        fits = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
        yield f"rollout.tp={rollout.tp}: must divide {what} {ranks}, such as {fits}"
    if rollout.tp != 1 and not traits_of(rollout.engine).tensor_parallel:
        yield f"rollout.tp={rollout.tp}: the {rollout.engine} engine has no tensor parallelism; use rollout.tp=1"
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
    if config.steps is not None and (problem := warmup_problem(config, config.steps)):
        yield problem
    if (config.checkpoint.best or "").removeprefix("min:").startswith("validation/") and config.validate_every == 0:
        yield f"checkpoint.best={config.checkpoint.best}: nothing is validated with validate_every=0"
    if config.rollout.validation.n > 1 and config.rollout.validation.temperature == 0:
        yield (
            f"rollout.validation.n={config.rollout.validation.n}: greedy samples are all equal; "
            "set rollout.validation.temperature above 0 or n=1"
        )


def warmup_problem(config: Config, steps: int) -> str | None:
    """A warm-up that a run of so many rollouts doesn't reach the end of."""
    updates = steps * config.algorithm.epochs * config.algorithm.mini_batches
    warmup = config.train.warmup_steps
    if warmup <= updates:
        return None
    return (
        f"train.warmup_steps={warmup}: the run has {updates} optimizer steps ({steps} rollouts × "
        f"algorithm.epochs={config.algorithm.epochs} × algorithm.mini_batches={config.algorithm.mini_batches}), so "
        f"that train.lr is never reached; give at most {updates}"
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
    if train.transformer_engine == "true" and not world.platform.runs_transformer_engine:
        yield "train.transformer_engine=true: Transformer Engine needs a CUDA GPU; use auto"
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
    traits = traits_of(rollout.engine)
    if rollout.process == "same" and traits.same_process is None:
        yield f"rollout.process=same: {traits.name} runs in processes of its own; use auto or separate"
    if rollout.process == "separate" and traits.own_processes is None:
        yield f"rollout.process=separate: {traits.name} has no process of its own; use auto or same"
    gives_up_weights = rollout.sleep_level == 2 and config.placement.name == "colocated"
    if runs_in_own_processes(rollout) and world.platform.separate_memory and gives_up_weights:
        yield (
            "rollout.sleep_level=2: weights that another process maps over CUDA IPC can't leave the GPU; set "
            "rollout.sleep_level=1 (its KV cache leaves, the weights stay), or rollout=vllm rollout.process=same"
        )


def _monitor(config: Config) -> Iterator[str]:
    from hybridengine.monitors.defaults import rules_of

    try:
        rules_of(config.monitor, config.reward.audit, config.parity)
    except ValueError as error:
        yield str(error)


def _reward(config: Config) -> Iterator[str]:
    model = config.reward.model
    if not config.reward.fn and not config.reward.terms and model.path is None:
        yield (
            "reward.fn=null: no reward; set reward.fn to exact_match, math, path.py:function or module:function, "
            "or reward.terms, or reward.model.path"
        )
    if model.path is not None and config.algorithm.dynamic_sampling.enable:
        yield (
            f"reward.model.path={model.path}: scores when a batch is complete, too late for "
            "algorithm.dynamic_sampling.enable=true, which replaces groups by their rewards; set it to false"
        )
    if (problem := model_problem(model)) is not None:
        yield problem


def _schedule(config: Config, world: World) -> Iterator[str]:
    placement, schedule, method = config.placement, config.schedule, config.sync.method
    if placement.name == "colocated":
        if schedule.name in ("one_step_off", "async"):
            yield (
                f"schedule.name={schedule.name}: generates while it trains, which ranks that do both can't; "
                "use placement=disaggregated, or schedule=sync or partial"
            )
        if method in ("broadcast", "delta", "checkpoint"):
            yield f"sync.method={method}: between pools of ranks; use placement=disaggregated, or auto"
        return
    if not 1 <= placement.rollout_ranks < world.size:
        yield (
            f"placement.rollout_ranks={placement.rollout_ranks}: must leave ranks for training, 1 to "
            f"{world.size - 1} of {world.size}"
            + ("; start the job with torchrun --nproc-per-node 2 or more" if world.size == 1 else "")
        )
    if method in ("collective", "gather"):
        yield f"sync.method={method}: colocated only; between pools: auto, pull, broadcast, delta, checkpoint"
    if config.train.shard_order != "auto":
        yield f"train.shard_order={config.train.shard_order}: shards can't nest in another pool's; leave it at auto"


def _pull(config: Config, world: World) -> Iterator[str]:
    """Where ranks can't map each other's weights, and directories that only a CPU offloads to."""
    memory, method, colocated = config.memory, config.sync.method, config.placement.name == "colocated"
    if memory.offload_dir is not None and world.platform.separate_memory:
        yield f"memory.offload_dir={memory.offload_dir}: for CPU runs; GPU memory goes to host memory, leave it null"
    if method != "pull" or world.size == 1:
        return
    if world.local_size < world.size:
        yield (
            f"sync.method=pull: maps memory between ranks of one node, and this node has {world.local_size} of the "
            f"{world.size} ranks; use sync.method={'collective' if colocated else 'broadcast'}, or auto"
        )
