"""What is wrong with the ``algorithm`` section, and what the user should know about it, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridengine.algorithms.advantages import ADVANTAGES
from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.correction import correction_of, correction_problems, preset_of
from hybridengine.algorithms.registry import algorithm_class, make_algorithm
from hybridengine.config import AlgorithmConfig, Config


def algorithm_problems(config: Config) -> list[str]:
    """Each names the key, its value and what would be right."""
    found = [*_values(config), *(correction_problems(config.algorithm.correction))]
    if found:
        return found
    try:
        make_algorithm(config)
    except ValueError as error:
        return [str(error)]
    return [*_groups(config), *_objective(config), *_correction(config), *_critic(config)]


def algorithm_notes(config: Config) -> Iterator[str]:
    """What was chosen and why, and where the loss is not quite what it is called; printed once."""
    preset = preset_of(config)
    if config.algorithm.correction.preset == "auto" and preset != "none":
        yield f"algorithm.correction=auto: {preset}, because schedule={config.schedule.name} trains on older samples"
    if truncated := _truncation(config):
        yield (
            f"{truncated}: responses are drawn from the truncated distribution and scored under the full one, so the "
            "gradient is biased towards what truncation keeps; 1 (top_p) and 0 (top_k, min_p) are exact"
        )


def _values(config: Config) -> Iterator[str]:
    if 0 < config.algorithm.clip_dual <= 1:
        yield f"algorithm.clip_dual={config.algorithm.clip_dual}: must be above 1, or 0 for off"
    buffer, limit = config.algorithm.overlong_buffer, config.rollout.max_tokens
    if buffer is not None and buffer > limit:
        yield f"algorithm.overlong_buffer={buffer}: must be 1 to rollout.max_tokens={limit} tokens, or null for off"


def _groups(config: Config) -> Iterator[str]:
    """How many samples a prompt needs."""
    algorithm, size = config.algorithm, config.rollout.samples_per_prompt
    chosen = algorithm_class(algorithm)
    own_baseline = chosen.needs_critic or chosen.advantages is not Algorithm.advantages
    needed = 1 if own_baseline else ADVANTAGES[algorithm.advantage].min_samples
    if size < needed:
        alone = " or ".join(name for name, baseline in ADVANTAGES.items() if baseline.min_samples == 1)
        yield (
            f"rollout.samples_per_prompt={size}: algorithm.advantage={algorithm.advantage} compares the samples of one "
            f"prompt; set rollout.samples_per_prompt to {needed} or more, or algorithm.advantage to {alone}"
        )
    elif size == 1:
        for name, on in (
            ("drop_zero_variance", algorithm.drop_zero_variance),
            ("dynamic_sampling.enable", algorithm.dynamic_sampling.enable),
        ):
            if on:
                yield (
                    f"algorithm.{name}=true: with rollout.samples_per_prompt=1 no group has two different rewards, so "
                    "that nothing would be trained on; set it to false"
                )


def _objective(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    in_reward = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    compares = correction_of(config.algorithm.correction).weight != "none" or preset_of(config) != "none"
    if (truncated := _truncation(config)) and (compares or algorithm.old_logprobs == "rollout" or in_reward):
        yield (
            f"{truncated}: the trainer scores the full distribution, so ratios against the truncated rollout "
            "distribution (algorithm.correction, algorithm.old_logprobs=rollout, algorithm.kl_in=reward) are biased; "
            "set rollout.top_p=1 rollout.top_k=0 rollout.min_p=0, or leave those at none, auto and loss"
        )
    if in_reward and algorithm.kl_estimator in ("k2", "k3_ratio"):
        what = "squared log-ratio" if algorithm.kl_estimator == "k2" else "ratio"
        yield (
            f"algorithm.kl_estimator={algorithm.kl_estimator}: {what} is a loss, not a reward; use k1 or k3 with "
            "kl_in=reward"
        )
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1: in the loss its gradient is 0 on average, so it adds noise and no pull towards "
            "the reference; use k3_ratio, k2 or k3, or algorithm.kl_in=reward"
        )


def _correction(config: Config) -> Iterator[str]:
    correction, algorithm = make_algorithm(config).correction, config.algorithm
    if algorithm.old_logprobs == "rollout" and (correction.weight, correction.reject) != ("none", "none"):
        yield (
            f"algorithm.old_logprobs=rollout with algorithm.correction.preset={preset_of(config)}: the ratio is "
            "against the rollout already, which leaves nothing to correct; set algorithm.correction=none, or "
            "algorithm.old_logprobs=auto"
        )
    for name in ("bounds", "outside"):
        value = getattr(algorithm.correction, name)
        if value is not None and correction.weight == "none":
            yield (
                f"algorithm.correction.{name}={value}: has no effect without a weight; set "
                "algorithm.correction.weight, or a preset that has one"
            )


def _critic(config: Config) -> Iterator[str]:
    algorithm, critic = config.algorithm, config.critic
    if not algorithm_class(algorithm).needs_critic:
        for name in ("path", "engine"):
            if (value := getattr(critic, name)) is not None:
                yield f"critic.{name}={value}: algorithm.name={algorithm.name} has no critic; set algorithm=ppo"
        return
    if algorithm.advantage != AlgorithmConfig().advantage:
        yield f"algorithm.advantage={algorithm.advantage}: {algorithm.name}'s baseline is its critic; leave it out"
    if (critic.engine or config.train.engine) == "megatron" and config.train.engine != "megatron":
        yield "critic.engine=megatron: its degrees are those of train, with train.engine=megatron; leave it out"
    if critic.path is not None and critic.path != "embedded" and not (Path(critic.path) / "config.json").is_file():
        yield f"critic.path={critic.path}: no config.json in it; give a Hugging Face model directory"


def _truncation(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.top_p < 1:
        return f"rollout.top_p={rollout.top_p}"
    if rollout.top_k > 0:
        return f"rollout.top_k={rollout.top_k}"
    return f"rollout.min_p={rollout.min_p}" if rollout.min_p > 0 else None
