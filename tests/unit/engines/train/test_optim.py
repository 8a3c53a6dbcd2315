"""Learning-rate schedules, decay groups, clipping, and the optimizer against torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from hybridengine.config import TrainConfig
from hybridengine.engines.train.export import plan_files, sources
from hybridengine.engines.train.optim import ShardedAdamW, clip_grad_norm, is_decayed, learning_rate
from hybridengine.sync.plan.spec import Pattern, Piece


@pytest.mark.parametrize(
    ("schedule", "warmup", "ratio", "expected"),
    [
        ("constant", 0, 0.0, [1, 1, 1, 1, 1]),
        ("constant", 2, 0.0, [0.5, 1, 1, 1, 1]),
        ("linear", 2, 0.0, [0.5, 1, 2 / 3, 1 / 3, 0]),
        ("linear", 0, 0.5, [1, 0.875, 0.75, 0.625, 0.5]),
        ("cosine", 0, 0.0, [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]),
        ("cosine", 1, 0.2, [1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]),
    ],
    ids=["constant", "warm-up", "linear", "linear-floor", "cosine", "cosine-warm-up-floor"],
)
def test_schedule(schedule: str, warmup: int, ratio: float, expected: list[float]) -> None:
    config = TrainConfig(lr=1.0, lr_schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    assert [learning_rate(step, 5, config) for step in range(5)] == pytest.approx(expected)


def test_schedule_survives_a_run_longer_than_planned() -> None:
    config = TrainConfig(lr=1.0, lr_schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(50, 5, config) == pytest.approx(0.1)
    assert learning_rate(0, 1, config) == pytest.approx(1.0)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.lr_schedule is 'step'.*constant, cosine, linear"):
        learning_rate(0, 5, TrainConfig(lr_schedule="step"))


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("model.embed_tokens.weight", (9, 4), True),
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.norm.weight", (4,), False),
    ],
)
def test_decay_groups(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert is_decayed(name, shape) is decayed


@pytest.mark.parametrize(("max_norm", "scale"), [(0.0, 1.0), (10.0, 1.0), (2.5, 0.5)], ids=["off", "below", "clipped"])
def test_clipping(max_norm: float, scale: float) -> None:
    """Gradients [3] and [0, 4] have norm 5."""
    grads = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert clip_grad_norm(grads, max_norm, None) == pytest.approx(5.0)
    torch.testing.assert_close(torch.cat(grads), torch.tensor([3.0, 0.0, 4.0]) * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="not updated"):
        clip_grad_norm([torch.tensor([bad, 1.0])], 1.0, None)


def test_moments_round_trip_continues_as_if_uninterrupted() -> None:
    """Four steps in a row, or two, the moments moved into a new optimizer, and two more: the same bits."""
    config = TrainConfig(lr=0.1, weight_decay=0.1)
    grads = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def run(weights: torch.Tensor, optimizer: ShardedAdamW, steps: range) -> None:
        for i in steps:
            optimizer.params["w"].grad = grads[i].clone()
            optimizer.step(0.1)

    straight = torch.ones(3)
    run(straight, ShardedAdamW({"w": straight, "none": torch.empty(0)}, ["w"], config), range(4))

    resumed = torch.ones(3)
    first = ShardedAdamW({"w": resumed, "none": torch.empty(0)}, ["w"], config)
    run(resumed, first, range(2))
    second = ShardedAdamW({"w": resumed, "none": torch.empty(0)}, ["w"], config)
    for key, tensors in second.moments().items():
        tensors["w"].copy_(first.moments()[key]["w"])
    second.set_steps(2)
    run(resumed, second, range(2, 4))
    assert torch.equal(straight, resumed)
    assert second.steps == 4


def test_export_files() -> None:
    """Two writers: the largest, c, to the first and a to the second, then b and d to whoever has less: 11 and 11."""

    def plan(writers: int, limit: int) -> list[tuple[str, int, tuple[str, ...]]]:
        files = plan_files({"a": 6, "b": 4, "c": 11, "d": 1}, writers, limit)
        return [(file.name, file.writer, file.params) for file in files]

    assert plan(1, 100) == [("model.safetensors", 0, ("a", "b", "c", "d"))]
    assert plan(1, 10) == [
        ("model-00001-of-00003.safetensors", 0, ("a", "b")),
        ("model-00002-of-00003.safetensors", 0, ("c",)),
        ("model-00003-of-00003.safetensors", 0, ("d",)),
    ]
    assert plan(2, 10) == [
        ("model-00001-of-00003.safetensors", 0, ("c",)),
        ("model-00002-of-00003.safetensors", 1, ("a", "b")),
        ("model-00003-of-00003.safetensors", 1, ("d",)),
    ]


def test_export_sources() -> None:
    """Two replicas of two halves: who has a half itself is not sent it, others take turns in giving it."""
    halves = [Piece((at,), (4,), slot=0, start=0, strides=(1,)) for at in (0, 4)]
    pattern = Pattern((8,), [[halves[0]], [halves[1]], [halves[0]], [halves[1]]])
    assert sources(pattern, 0) == [[halves[0]], [halves[1]], [], []]
    assert sources(pattern, 1) == [[], [halves[1]], [halves[0]], []]
    assert sources(pattern, 3) == [[], [], [halves[0]], [halves[1]]]
