"""Optimizer steps of which no token is trained on: nothing is run, and they are counted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.algorithms.grpo import GRPO
from hybridengine.config import AlgorithmConfig, Config, RolloutConfig
from hybridengine.loop import Trainer
from hybridengine.types import Sample


class Engine:
    """Records what it is asked."""

    replica, num_replicas, version = 0, 1, 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward_backward(self, samples: Any, loss_fn: Any, **_: Any) -> tuple[dict[str, float], None]:
        self.calls.append(f"forward_backward {len(samples)}")
        return {"loss": 1.0, "tokens": float(sum(sum(s.loss_mask) for s in samples))}, None

    def optimizer_step(self) -> dict[str, float]:
        self.calls.append("optimizer_step")
        return {"grad_norm": 1.0, "lr": 1e-6}


@pytest.mark.parametrize(
    ("trained", "calls", "skipped"),
    [
        ([True, True, True, True], ["forward_backward 2", "optimizer_step"] * 2, 0),
        ([False, False, True, True], ["forward_backward 2", "optimizer_step"], 1),
        ([False, False, False, False], [], 2),
    ],
    ids=["all", "one-of-two", "none"],
)
def test_an_optimizer_step_without_a_token_is_skipped(
    tmp_path: Path, trained: list[bool], calls: list[str], skipped: int
) -> None:
    """Momentum and weight decay would move the weights, and the schedule would go on."""
    section, rollout = AlgorithmConfig(mini_batches=2), RolloutConfig(samples_per_prompt=2)
    engine, config = Engine(), Config(algorithm=section, rollout=rollout)
    trainer: Any = Trainer(
        config=config, train=engine, algorithm=GRPO(section, rollout), phases=lambda *_: nullcontext(),
        checkpointer=SimpleNamespace(directory=tmp_path),
        **dict.fromkeys(("world", "rollouts", "validation", "logger", "interrupt", "monitor", "total_steps")),
    )  # type: ignore[arg-type]  # fmt: skip
    samples = [
        Sample(prompt_ids=[1], response_ids=[2, 2], loss_mask=[keep] * 2, advantages=[1.0] * 2) for keep in trained
    ]
    metrics = trainer._update(samples, SimpleNamespace(add=lambda *_: None, reduce=dict))
    assert engine.calls == calls
    assert metrics["skipped_updates"] == skipped
    assert ("loss" in metrics) == ("grad_norm" in metrics) == bool(calls)
