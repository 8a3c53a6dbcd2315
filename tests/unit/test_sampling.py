"""What the configuration says of sampling reaches the engines, field by field, for training and for validation."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hybridengine.assemble import end_tokens
from hybridengine.config import Config, ModelConfig, RolloutConfig, ValidationSampling
from hybridengine.sampling import training_params, validation_params

ROLLOUT = RolloutConfig(
    samples_per_prompt=7, max_tokens=33, temperature=0.75, top_p=0.875, top_k=11, min_p=0.125, stop=["</a>", "b"],
    validation=ValidationSampling(n=3, max_tokens=44, temperature=0.25, top_p=0.625, top_k=5, min_p=0.0625),
)  # fmt: skip


def config(rollout: RolloutConfig) -> Config:
    return Config(model=ModelConfig(path="embedded"), rollout=rollout)


def test_training() -> None:
    assert asdict(training_params(config(ROLLOUT))) == {
        "n": 7, "max_tokens": 33, "temperature": 0.75, "top_p": 0.875, "top_k": 11, "min_p": 0.125,
        "stop": ("</a>", "b"),
    }  # fmt: skip


def test_validation() -> None:
    assert asdict(validation_params(config(ROLLOUT))) == {
        "n": 3, "max_tokens": 44, "temperature": 0.25, "top_p": 0.625, "top_k": 5, "min_p": 0.0625,
        "stop": ("</a>", "b"),
    }  # fmt: skip


def test_validation_has_the_length_of_training_where_it_has_none_of_its_own() -> None:
    assert validation_params(config(RolloutConfig(max_tokens=55))).max_tokens == 55


@pytest.mark.parametrize(("eos", "ids"), [(7, [7]), (0, [0]), (None, [])])
def test_end_tokens_are_the_tokenizer_s(eos: int | None, ids: list[int]) -> None:
    assert end_tokens(SimpleNamespace(eos_token_id=eos)) == ids
