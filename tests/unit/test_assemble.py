"""What the engines are built with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridengine.assemble import Inputs, engine_options, load_tokenizer
from hybridengine.config.compose import ConfigError, build
from hybridengine.engines.train.optim import learning_rate
from hybridengine.validate.notes import rate_notes


def options(*overrides: str, steps: int) -> tuple[Any, Any]:
    config = build(["+experiment=quickstart", *overrides])
    inputs = SimpleNamespace(model_path=Path("m"), total_steps=steps, tokenizer=SimpleNamespace(eos_token_id=2))
    return engine_options(config, cast(Inputs, inputs)), config


def test_a_cosine_ends_with_the_last_of_all_optimizer_steps() -> None:
    """3 steps × 2 epochs × 2 mini-batches = 12 optimizer steps: the rate falls from the first to the last of them."""
    made, config = options("algorithm.epochs=2", "algorithm.mini_batches=2", "train.lr_schedule=cosine", steps=3)
    rates = [learning_rate(step, made.total_steps, config.train) for step in range(12)]
    assert made.total_steps == 12 and rates[0] == config.train.lr and rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(later < earlier for earlier, later in zip(rates, rates[1:], strict=False))


def test_steps_of_a_critic_and_of_the_policy_that_waits_for_it() -> None:
    made, _ = options("algorithm=ppo", "critic.warmup_steps=2", "critic.epochs=3", "algorithm.mini_batches=2", steps=5)
    assert (made.total_steps, made.critic_steps) == (3 * 2, 5 * 3 * 2)


def test_end_tokens_and_context() -> None:
    made, config = options("data.max_prompt_tokens=20", "rollout.max_tokens=5", steps=1)
    assert made.eos_token_ids == [2] and made.max_model_len == 25
    assert options("rollout.max_model_len=64", steps=1)[0].max_model_len == 64


@pytest.mark.parametrize(
    ("overrides", "steps", "noted"),
    [
        (["train.lr_schedule=cosine"], 2, True),
        (["train.lr_schedule=linear", "algorithm.epochs=2"], 10, True),
        (["train.lr_schedule=linear", "algorithm.epochs=2"], 11, False),
        (["train.lr_schedule=cosine", "train.min_lr_ratio=0.1"], 2, False),
        (["train.lr_schedule=cosine", "train.warmup_steps=2"], 2, False),  # the rate only rises
        ([], 2, False),
    ],
)
def test_a_last_step_that_changes_nothing_is_said(overrides: list[str], steps: int, noted: bool) -> None:
    config = build(["+experiment=quickstart", *overrides])
    updates = steps * config.algorithm.epochs
    found = list(rate_notes(config.train, updates))
    assert len(found) == noted
    assert not noted or f"the last of the run's {updates} optimizer steps" in found[0]
    rate = learning_rate(updates - 1, updates, config.train)
    assert rate > 0 or noted or updates > 20


def test_a_model_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    config = build(["+experiment=quickstart", f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match=f"model.tokenizer={tmp_path}: the directory has no tokenizer .tokenizer"):
        load_tokenizer(config, tmp_path)
