"""Baselines against numbers worked out by hand, and an independent reference where samples are rejected."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.advantages import ADVANTAGES, Rewards, group_advantages
from hybridengine.algorithms.overlong import overlong_penalty

GROUP_KINDS = ["group_std", "group_mean", "leave_one_out"]


def advantages(
    rewards: list[float], size: int, kind: str, kept: list[bool] | None = None, greedy: list[float] | None = None
) -> list[float]:
    return group_advantages(Rewards.of(rewards, size, kept=kept, greedy=greedy), kind).ravel().tolist()


@pytest.mark.parametrize(
    ("kind", "size", "rewards", "expected"),
    [
        pytest.param("leave_one_out", 4, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3], id="leave_one_out"),
        pytest.param("group_mean", 4, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25], id="group_mean"),
        pytest.param("group_std", 2, [1, 0], [0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)],
                     id="group_std"),  # mean 0.5, sample standard deviation √0.5
        pytest.param("batch_std", 2, [1, 0, 0, 1], [1, -1, -1, 1], id="batch_std"),  # mean .5, deviation .5
        pytest.param("batch_std", 1, [1, 0, 0, 1], [1, -1, -1, 1], id="batch_std-one-sample"),
        pytest.param("group_mean_batch_std", 2, [1, 0, 1, 1], [math.sqrt(2), -math.sqrt(2), 0, 0],
                     id="group_mean_batch_std"),  # [.5, -.5, 0, 0] over √(1/8)
    ],
)  # fmt: skip
def test_by_hand(kind: str, size: int, rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards, size, kind) == pytest.approx(expected, abs=1e-12)


def test_greedy_is_a_baseline_per_prompt() -> None:
    assert advantages([1, 0], 2, "greedy", greedy=[1]) == [0, -1]
    assert advantages([1, 0, 1, 1], 2, "greedy", greedy=[0.5, 0]) == [0.5, -0.5, 1, 1]
    assert advantages([1, 0], 1, "greedy", greedy=[0, 1]) == [1, -1]
    with pytest.raises(ValueError, match="needs the rewards of greedy samples"):
        advantages([1, 0], 2, "greedy")


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_equal_float32_rewards_are_exactly_zero(kind: str) -> None:
    rewards = [float(np.float32(0.3))] * 8 + [1.0] + [0.0] * 7
    found = advantages(rewards, 8, kind)
    assert found[:8] == [0.0] * 8
    assert Rewards.of(rewards, 8).flat.tolist() == [True, False]
    assert sum(found[8:]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        pytest.param([0.1 + 0.2, 0.3, 0.3], True, id="weighted-sum-rounding"),
        pytest.param([0.3, float(np.float32(0.3)), 0.3], True, id="float32-rounding"),
        pytest.param([-2.0, -2.0, -2.0], True, id="negative"),
        pytest.param([0.0, 0.0, 0.0], True, id="zeros"),
        pytest.param([0.0, 0.0, 1e-9], False, id="small-but-different"),
        pytest.param([1000.0, 1000.0, 1000.1], False, id="large-but-different"),
    ],
)
def test_zero_variance_up_to_rounding(rewards: list[float], flat: bool) -> None:
    assert Rewards.of(rewards, 3).flat.tolist() == [flat]
    for kind in (*GROUP_KINDS, "batch_std", "group_mean_batch_std"):
        assert (advantages(rewards, 3, kind) == [0.0] * 3) == flat


@pytest.mark.parametrize(
    ("rewards", "size", "kind", "message"),
    [
        ([1.0], 1, "group_std", "samples_per_prompt=1: algorithm.advantage=group_std compares"),
        ([1.0], 1, "group_mean_batch_std", "samples_per_prompt=1"),
        ([1.0] * 3, 2, "group_std", "no whole number"),
        ([1.0, math.nan], 2, "group_std", "sample 1 is not finite"),
        ([1.0, 0.0], 2, "median", "algorithm.advantage=median: must be one of group_std"),
    ],
)
def test_bad_groups(rewards: list[float], size: int, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages(rewards, size, kind)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_what_is_rejected_may_be_anything_and_has_no_advantage(kind: str) -> None:
    """NaN and infinity stand where samples were rejected; the others are as if these had never been."""
    rewards, kept = [1.0, math.nan, 0.0, math.inf, 0.0, 1.0], [True, False, True, False, True, True]
    found = advantages(rewards, 3, kind, kept, greedy=[0.0, 0.0])
    assert found[1] == found[3] == 0.0
    alone = advantages([1.0, 0.0, 0.0, 1.0], 2, kind, greedy=[0.0, 0.0])
    assert [found[i] for i in (0, 2, 4, 5)] == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "group_mean_batch_std"])
def test_a_lone_survivor_has_advantage_zero_and_is_counted(kind: str) -> None:
    rewards = Rewards.of([1.0, 0.0, 1.0, 0.0], 2, kept=[True, False, True, True])
    assert rewards.lone_survivors == 1
    found = group_advantages(rewards, kind)
    assert found[0].tolist() == [0.0, 0.0] and found[1, 0] > 0


def test_a_group_without_survivors() -> None:
    assert advantages([1.0, 0.0], 2, "group_std", [False, False]) == [0.0, 0.0]
    assert advantages([1.0, 0.0], 2, "batch_std", [False, False]) == [0.0, 0.0]
    assert Rewards.of([1.0, 0.0], 2, kept=[False, False]).lone_survivors == 0


def reference(kind: str, groups: list[list[float]]) -> list[float]:
    """One reward after the other, from the formulas; a group of one has 0."""
    centred = [[r - statistics.fmean(g) if len(g) > 1 else 0.0 for r in g] for g in groups]
    flat = [r for g in groups for r in g]
    if kind == "batch_std":
        spread = statistics.pstdev(flat)
        return [(r - statistics.fmean(flat)) / spread for r in flat]
    if kind == "group_mean_batch_std":
        spread = math.sqrt(statistics.fmean([c * c for g in centred for c in g]))
        return [c / spread if spread else 0.0 for g in centred for c in g]
    scale = {
        "group_std": lambda g: 1 / (statistics.stdev(g) + 1e-6),
        "group_mean": lambda g: 1.0,
        "leave_one_out": lambda g: len(g) / (len(g) - 1),
    }[kind]
    return [c * scale(g) if len(g) > 1 else 0.0 for g, row in zip(groups, centred, strict=True) for c in row]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*GROUP_KINDS, "batch_std", "group_mean_batch_std"]),
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=3, max_size=3), min_size=2, max_size=5
    ),
)
def test_with_rejected_samples(kind: str, rows: list[list[tuple[int, bool]]]) -> None:
    """Equal to the formulas on what is left, whatever is left."""
    survivors = [[float(r) for r, keep in row if keep] for row in rows]
    values = [r for row in survivors for r in row]
    if len(set(values)) < 2:
        return
    kept = [keep for row in rows for _, keep in row]
    found = advantages([float(r) for row in rows for r, _ in row], 3, kind, kept)
    assert [a for a, keep in zip(found, kept, strict=True) if keep] == pytest.approx(
        reference(kind, [row for row in survivors if row]), abs=1e-9
    )


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_overlong_penalty(length: int, expected: float) -> None:
    """Limit 100, buffer 20: nothing up to 80 tokens, -1/20 for each beyond."""
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(expected)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_buffers_that_can_t_be(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"algorithm.overlong_buffer={buffer}: must be 1 to rollout.max_tokens=100"):
        overlong_penalty(5, limit=100, buffer=buffer)
