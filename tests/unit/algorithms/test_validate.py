"""The ``algorithm`` section: ranges, choices and contradictions are named before anything starts."""

from __future__ import annotations

import functools

import pytest
from omegaconf import OmegaConf

from hybridengine.algorithms.validate import algorithm_notes, algorithm_problems
from hybridengine.config import Config
from hybridengine.config.compose import ConfigError, build, config_groups
from hybridengine.validate.values import check_values

BASE = ["model.path=m", "data.train=d.jsonl", "reward.fn=exact_match"]


@functools.cache
def preset(name: str) -> Config:
    return build([*BASE, f"algorithm={name}"])


def composed(*overrides: str, algorithm: str = "grpo") -> Config:
    """As ``build`` would, but without Hydra, which takes half a second."""
    base = OmegaConf.structured(preset(algorithm))
    config = OmegaConf.to_object(OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides))))
    assert isinstance(config, Config)
    return config


def problems(*overrides: str, algorithm: str = "grpo") -> str:
    config = composed(*overrides, algorithm=algorithm)
    return "\n".join([*check_values(config)] or algorithm_problems(config))


@pytest.mark.parametrize("name", config_groups()["algorithm"])
def test_every_algorithm_s_yaml_is_without_contradiction(name: str) -> None:
    assert problems(algorithm=name) == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("clip_low=1.5", "clip_low=1.5: must be in [0, 1]"),
        ("clip_low=-0.1", "clip_low=-0.1: must be in [0, 1]"),
        ("clip_high=inf", "clip_high=inf: must be a finite number"),
        ("clip_dual=0.5", "clip_dual=0.5: must be above 1, or 0 for off"),
        ("constant_length=-5", "constant_length=-5: must be greater than 0"),
        ("entropy_coef=nan", "entropy_coef=nan: must be a finite number"),
        ("kl_coef=inf", "kl_coef=inf: must be a finite number"),
        ("kl_coef=-1", "kl_coef=-1.0: must be 0 or more"),
        ("kl_clamp=30", "kl_clamp=30.0: must be in [0, 20]"),
        ("epochs=0", "epochs=0: must be greater than 0"),
        ("mini_batches=0", "mini_batches=0: must be greater than 0"),
        ("advantage=gae2", "advantage=gae2: must be one of group_std | group_mean"),
        ("loss_aggregation=sum", "loss_aggregation=sum: must be one of token-mean"),
        ("kl_estimator=k4", "kl_estimator=k4: must be one of k1 | k2 | k3 | k3_ratio"),
        ("kl_in=both", "kl_in=both: must be one of loss | reward"),
        ("old_logprobs=never", "old_logprobs=never: must be one of auto | recompute | rollout"),
        ("overlong_buffer=0", "overlong_buffer=0: must be greater than 0"),
        ("overlong_buffer=300", "overlong_buffer=300: must be 1 to rollout.max_tokens=256 tokens"),
        ("overlong_penalty=nan", "overlong_penalty=nan: must be 0 or more"),
        ("correction.preset=tiss", "correction.preset=tiss: must be one of auto | none | tis"),
        ("correction.weight=word", "correction.weight=word: must be one of none | token"),
        ("correction.bounds=[3,1]", "correction.bounds=[3.0, 1.0]: must be [low, high] with 0 <= low < high"),
        ("correction.bounds=[0,3]", "correction.bounds=[0.0, 3.0]: has no effect without a weight"),
        ("dynamic_sampling.max_rounds=0", "dynamic_sampling.max_rounds=0: must be greater than 0"),
        ("dynamic_sampling.on_exhausted=wait", "dynamic_sampling.on_exhausted=wait: must be one of fill | error"),
    ],
)
def test_values_out_of_range(override: str, message: str) -> None:
    assert f"algorithm.{message}" in problems(f"algorithm.{override}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "kl_estimator=k1: in the loss its gradient is 0"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k2"], "kl_estimator=k2: squared"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k3_ratio"], "=k3_ratio: ratio"),
        (["algorithm.correction.preset=tis", "algorithm.old_logprobs=rollout"], "leaves nothing to correct"),
        (["algorithm.correction.preset=tis", "rollout.top_p=0.9"], "rollout.top_p=0.9: the trainer scores"),
        (["critic.path=x"], "critic.path=x: algorithm.name=grpo has no critic; set algorithm=ppo"),
        (["algorithm.name=ppo", "critic.path=/nowhere"], "critic.path=/nowhere: no config.json in it"),
        (["algorithm.name=ppo", "algorithm.advantage=greedy"], "algorithm.advantage=greedy: ppo's baseline is its"),
        (["algorithm.name=ppo", "critic.engine=megatron"], "critic.engine=megatron: its degrees are those of train"),
        (["rollout.samples_per_prompt=1"], "algorithm.advantage=group_std compares the samples of one prompt; set"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=group_mean_batch_std"], "to batch_std or greedy"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=greedy", "algorithm.drop_zero_variance=true"],
         "no group"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=batch_std", "algorithm.dynamic_sampling.enable=true"],
         "algorithm.dynamic_sampling.enable=true: with rollout.samples_per_prompt=1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    assert message in problems(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.samples_per_prompt=1", "algorithm.advantage=greedy"],
        ["rollout.samples_per_prompt=1", "algorithm.advantage=batch_std"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
        ["algorithm.name=ppo", "rollout.samples_per_prompt=1"],
        ["algorithm.name=ppo", "train.engine=megatron", "critic.engine=fsdp"],
        ["algorithm.kl_estimator=k1"],
        ["schedule.name=partial", "algorithm.old_logprobs=rollout"],
        ["algorithm.correction.preset=icepop", "algorithm.correction.bounds=[0.25,4]"],
        ["algorithm.correction.reject=token", "algorithm.correction.reject_bounds=[0.5,2]"],
        ["rollout.top_p=0.9"],
    ],
)  # fmt: skip
def test_what_does(overrides: list[str]) -> None:
    assert problems(*overrides) == ""


def test_a_short_form_sets_the_preset() -> None:
    for text in ("algorithm.correction=icepop", "algorithm.correction.preset=icepop"):
        assert build([*BASE, text]).algorithm.correction.preset == "icepop"
    given = build([*BASE, "algorithm.correction={preset: mis, bounds: [0, 3]}"]).algorithm.correction
    assert (given.preset, given.bounds) == ("mis", [0.0, 3.0])
    with pytest.raises(ConfigError, match="unknown key 'algorithm.correction.cap'; did you mean"):
        build([*BASE, "algorithm.correction.cap=2"])


def test_notes_say_what_was_chosen_and_what_is_biased() -> None:
    assert list(algorithm_notes(composed())) == []
    (note,) = algorithm_notes(composed("schedule.name=partial"))
    assert note == "algorithm.correction=auto: tis, because schedule=partial trains on older samples"
    (note,) = algorithm_notes(composed("rollout.top_k=20"))
    assert note.startswith("rollout.top_k=20: responses are drawn from the truncated distribution and scored under the")
