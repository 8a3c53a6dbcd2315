"""The sizes of a step, for the log."""

from __future__ import annotations

from hybridengine.config import Config, TrainConfig
from hybridengine.distributed.world import World


def step_sizes(config: Config, world: World, total_steps: int) -> str:
    """The sizes of a step for the log: prompts, samples, mini-batches, ranks, and how they multiply."""
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    steps = config.algorithm.epochs * config.algorithm.mini_batches
    rollout_ranks = config.placement.rollout_ranks if config.placement.name == "disaggregated" else 0
    return (
        f"{config.name}: {total_steps} steps × {config.data.prompts_per_step} prompts × "
        f"{config.rollout.samples_per_prompt} samples = {samples} sequences of at most "
        f"{config.data.max_prompt_tokens} + {config.rollout.max_tokens} tokens per step; "
        f"{steps} optimizer step(s) per rollout of {samples // config.algorithm.mini_batches} sequences, "
        f"micro-batches of at most {config.train.max_tokens_per_micro_batch} tokens per rank; "
        f"{world.size} rank(s): {trained_by(config.train)} over {world.size - rollout_ranks or world.size}, "
        f"{config.rollout.engine} {(rollout_ranks or world.size) // config.rollout.tp} × TP {config.rollout.tp}; "
        f"schedule {config.schedule.name}"
    )


def trained_by(train: TrainConfig) -> str:
    """The training engine with its degrees of parallelism that are not 1, such as "megatron TP 2 × PP 2"."""
    sizes = {name.upper(): getattr(train, name) for name in ("tp", "pp", "vpp", "ep")}
    return f"{train.engine} {' × '.join(f'{name} {size}' for name, size in sizes.items() if size > 1)}".strip()
