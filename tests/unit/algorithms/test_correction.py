"""Importance weights, rejection and their metrics: values by hand, and a NumPy oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine.algorithms.correction import (
    PRESETS,
    accepted_tokens,
    correction_of,
    importance_weights,
    log_weights,
    preset_of,
)
from hybridengine.algorithms.grpo import GRPO
from hybridengine.algorithms.losses import LossCounts
from hybridengine.config import AlgorithmConfig, Config, CorrectionConfig, RolloutConfig
from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.types import Prompt, Sample, Trajectory


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("tis", [0.1, 0.5, 1, 2, 2]),
        ("mis", [0.1, 0.5, 1, 0, 0]),
        ("icepop", [0, 0.5, 1, 3, 0]),
        ("seq_mask_tis", [0.1, 0.5, 1, 3, 6]),
    ],
)
def test_weights_of_the_presets(preset: str, expected: list[float]) -> None:
    logs = torch.tensor([0.1, 0.5, 1, 3, 6], dtype=torch.float64).log()
    assert importance_weights(PRESETS[preset], logs).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("level", "weight"), [("token", math.exp(0.2)), ("sequence", 1.49182), ("geometric", 1.22140)])
def test_levels(level: str, weight: float) -> None:
    """Δ = [.2, .2]: e^.2 per token, e^.4 for the sequence, e^.2 for its mean; a masked token does not count."""
    difference = torch.tensor([0.2, 0.2, math.nan], dtype=torch.float64)
    mask, ids = torch.tensor([True, True, False]), torch.tensor([0, 0, 0])
    logs = log_weights(difference, mask, ids, level)
    found = importance_weights(correction_of(CorrectionConfig(weight=level, bounds=[0.0, 9.0])), logs)
    assert found[:2].tolist() == pytest.approx([weight] * 2, abs=5e-6)
    assert torch.isfinite(found).all()


def test_sequence_weights_are_products_over_unmasked_tokens() -> None:
    """Two sequences of 2 and 3 tokens: exp of the summed log-ratio, cut at the cap."""
    difference = torch.tensor([0.5, 0.2, -1.0, 0.5, float("nan")])
    mask, ids = torch.tensor([True, True, True, True, False]), torch.tensor([0, 0, 1, 1, 1])
    correction = correction_of(CorrectionConfig(preset="tis_sequence", bounds=[0.0, 1.9]))
    weights = importance_weights(correction, log_weights(difference, mask, ids, "sequence"))
    assert weights.tolist() == pytest.approx([min(math.exp(0.7), 1.9)] * 2 + [math.exp(-0.5)] * 3)


@pytest.mark.parametrize("preset", ["tis", "tis_sequence", "mis", "icepop", "seq_mask_tis"])
@pytest.mark.parametrize("delta", [-10_000.0, 10_000.0])
def test_any_difference_gives_finite_losses_and_gradients(preset: str, delta: float) -> None:
    result, gradient = step([[delta, 0.0]], CorrectionConfig(preset=preset))
    assert torch.isfinite(result.loss) and torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in result.metrics.values())


def step(differences: list[list[float]], config: CorrectionConfig, masks: list[list[bool]] | None = None) -> Any:
    """Loss and gradient of sequences whose tokens have log π_old - log π_rollout = ``differences``; ratio 1."""
    samples = [
        Sample(
            prompt_ids=[1], response_ids=[2] * len(row), loss_mask=masks[i] if masks else [True] * len(row),
            advantages=[1.0] * len(row), old_logprobs=[-1.0] * len(row), rollout_logprobs=[-1.0 - d for d in row],
        )
        for i, row in enumerate(differences)
    ]  # fmt: skip
    micro = build_micro_batch(samples, list(range(len(samples))), pad_id=0, packing=True)
    values = torch.full((len(micro.targets),), -1.0, requires_grad=True)
    algorithm = GRPO(AlgorithmConfig(correction=config), RolloutConfig(max_tokens=8))
    result = algorithm.loss_fn(LossCounts.of(samples))(values, None, micro)
    result.loss.backward()
    return result, values.grad


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("outside", ["truncate", "zero"])
def test_metrics_equal_a_numpy_oracle(level: str, outside: str) -> None:
    """And none of them is constant: each differs between two random batches."""
    found, expected = [], []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        rows = [rng.normal(0, 0.8, size=n) for n in rng.integers(1, 7, size=20)]
        masks = [rng.random(len(row)) < 0.8 for row in rows]
        config = CorrectionConfig(weight=level, bounds=[0.6, 1.7], outside=outside)
        result, _ = step([r.tolist() for r in rows], config, [m.tolist() for m in masks])
        algorithm = GRPO(AlgorithmConfig(correction=config), RolloutConfig(max_tokens=8))
        metrics = algorithm.metrics([{name: float(value) for name, value in result.metrics.items()}])
        found.append({name: value for name, value in metrics.items() if name.startswith("sampling/")})

        delta = np.concatenate([r[m] for r, m in zip(rows, masks, strict=True)])
        logs = np.concatenate([
            r[m] if level == "token" else np.full(m.sum(), (r[m].sum() if level == "sequence" else r[m].mean()))
            for r, m in zip(rows, masks, strict=True) if m.any()
        ])  # fmt: skip
        raw = np.exp(logs)
        weight = np.clip(raw, 0.6, 1.7) if outside == "truncate" else np.where((raw >= 0.6) & (raw <= 1.7), raw, 0)
        expected.append({
            "sampling/importance_weight": weight.mean(),
            "sampling/effective_sample_size": weight.sum() ** 2 / (len(weight) * np.square(weight).sum()),
            "sampling/weight_above": (raw > 1.7).mean(),
            "sampling/weight_below": (raw < 0.6).mean(),
            "sampling/kl": -delta.mean(),
            "sampling/chi2": np.exp(2 * delta).mean() - 1,
            "sampling/mean_exp_abs": np.exp(np.abs(delta)).mean(),
        })  # fmt: skip
    for ours, oracle in zip(found, expected, strict=True):
        assert ours.keys() == oracle.keys()
        for name, value in oracle.items():
            assert ours[name] == pytest.approx(value, rel=2e-5), name
    assert all(found[0][name] != found[1][name] for name in found[0])


# -- rejection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "ratios", "accepted"),
    [
        pytest.param({"reject": "token", "reject_bounds": [0.5, 2]}, [0.49, 0.51, 1.99, 2.1], [0, 1, 1, 0], id="token"),
        pytest.param({"reject": "sequence", "reject_bounds": [0.5, 2.0]}, [1.5, 1.5], [0, 0], id="sequence"),
        pytest.param({"reject": "geometric", "reject_bounds": [0.5, 2.0]}, [1.5, 1.5], [1, 1], id="geometric"),
        pytest.param({"reject": "geometric", "reject_bounds": [0.0, 2.0]}, [1e-9, 1.5], [1, 1], id="no-lower-bound"),
        # k3 = r - 1 - log r: of 2 it is .30685, of 1/2 .19315; their sum .5, their mean .25
        pytest.param({"reject": "token", "reject_metric": "k3", "reject_bounds": [0.0, 0.2]}, [2, 0.5, 1], [0, 1, 1],
                     id="token-k3"),
        pytest.param({"reject": "sequence", "reject_metric": "k3", "reject_bounds": [0.0, 0.4]}, [2, 0.5], [0, 0],
                     id="sequence-k3"),
        pytest.param({"reject": "geometric", "reject_metric": "k3", "reject_bounds": [0.0, 0.4]}, [2, 0.5], [1, 1],
                     id="geometric-k3"),
        pytest.param({"preset": "seq_mask_tis"}, [1.001, 1.0], [1, 1], id="seq_mask_tis-within"),
        pytest.param({"preset": "seq_mask_tis"}, [1.01, 1.0], [0, 0], id="seq_mask_tis-beyond"),
        pytest.param({"preset": "tis"}, [9.0, 0.01], [1, 1], id="tis-rejects-nothing"),
    ],
)  # fmt: skip
def test_what_is_accepted(keys: dict[str, Any], ratios: list[float], accepted: list[int]) -> None:
    old = [math.log(r) - 1 for r in ratios]
    found = accepted_tokens(correction_of(CorrectionConfig(**keys)), old, [-1.0] * len(ratios))
    assert found.tolist() == [bool(x) for x in accepted]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_rejected(bad: float) -> None:
    correction = correction_of(CorrectionConfig(reject="token", reject_bounds=[0.5, 2.0]))
    assert accepted_tokens(correction, [bad, -1.0], [-1.0, -1.0]).tolist() == [False, True]


def group(rewards: list[float], logprobs: list[list[float]]) -> list[Trajectory]:
    return [
        Trajectory(
            prompt=Prompt(index=0, token_ids=[1]), sample_index=k, token_ids=[5] * len(row), logprobs=row,
            versions=[0] * len(row), truncated=False, reward=reward, rewards={"r": reward},
        )
        for k, (reward, row) in enumerate(zip(rewards, logprobs, strict=True))
    ]  # fmt: skip


def rejecting(level: str, size: int, **changes: Any) -> GRPO:
    correction = CorrectionConfig(reject=level, reject_bounds=[0.5, 2.0])
    return GRPO(AlgorithmConfig(correction=correction, **changes), RolloutConfig(samples_per_prompt=size))


def test_rejection_comes_before_the_baseline() -> None:
    """Rewards [1, 0, 0], the last one rejected: mean .5 of what is left, and not 1/3."""
    algorithm = rejecting("sequence", 3, advantage="group_mean")
    assert algorithm.needs_old_logprobs
    trajectories = group([1.0, 0.0, 0.0], [[-1.0, -1.0]] * 3)
    old = [[-1.0, -1.0], [-1.0, -1.0], [-1.5, -1.5]]
    samples, metrics = algorithm.samples(trajectories, old_logprobs=old)
    assert [s.advantages[0] for s in samples] == [0.5, -0.5, 0.0]
    assert [s.loss_mask for s in samples] == [[True] * 2, [True] * 2, [False] * 2]
    assert LossCounts.of(samples) == LossCounts(tokens=4, sequences=2)
    assert metrics["sampling/rejected_sequences"] == pytest.approx(1 / 3)
    assert metrics["sampling/rejected_tokens"] == pytest.approx(1 / 3)
    assert samples[2].old_logprobs == [-1.5, -1.5]


def test_a_rejected_token_leaves_numerator_and_count() -> None:
    """Two sequences of 2 tokens, one token rejected: 3 tokens count, and its gradient is zero."""
    algorithm = rejecting("token", 2)
    old = [[-1.0, -3.0], [-1.0, -1.0]]
    samples, metrics = algorithm.samples(group([1.0, 0.0], [[-1.0, -1.0]] * 2), old_logprobs=old)
    assert samples[0].loss_mask == [True, False]
    assert metrics["sampling/rejected_tokens"] == 0.25 and metrics["sampling/rejected_sequences"] == 0.0
    micro = build_micro_batch(samples, [0, 1], pad_id=0, packing=True)
    values = torch.tensor([v for row in old for v in row], requires_grad=True)
    result = algorithm.loss_fn(LossCounts.of(samples))(values, None, micro)
    result.loss.backward()
    assert values.grad is not None and values.grad[1] == 0
    assert values.grad[0].item() == pytest.approx(-samples[0].advantages[0] / 3)


def test_a_sequence_whose_tokens_are_all_rejected_is_a_rejected_sequence() -> None:
    samples, metrics = rejecting("token", 2, advantage="group_mean").samples(
        group([1.0, 0.0], [[-1.0, -1.0]] * 2), old_logprobs=[[-4.0, -4.0], [-1.0, -1.0]]
    )
    assert [s.advantages[0] for s in samples] == [0.0, 0.0]  # the other one is alone now
    assert metrics["completions/lone_survivors"] == 1.0 and metrics["sampling/rejected_sequences"] == 0.5
    assert samples[1].loss_mask == [True, True]  # and counts


def test_unsound_samples_leave_the_baseline_also_without_a_correction() -> None:
    """Rewards [1, 0, 7] with a NaN among the last one's log-probabilities: mean .5, also with a KL in the reward."""
    algorithm = GRPO(
        AlgorithmConfig(advantage="group_mean", kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
        RolloutConfig(samples_per_prompt=3),
    )
    trajectories = group([1.0, 0.0, 7.0], [[-1.0], [-1.0], [math.nan]])
    samples, metrics = algorithm.samples(trajectories, [[-1.0]] * 3)
    assert [s.advantages[0] for s in samples] == [0.5, -0.5, 0.0]
    assert [s.loss_mask for s in samples] == [[True], [True], [False]]
    assert metrics["completions/unsound"] == 1.0


def test_rejection_needs_the_trainer_s_scores() -> None:
    with pytest.raises(ValueError, match="algorithm.correction.reject=token needs the trainer's scores first"):
        rejecting("token", 1, advantage="batch_std").samples(group([1.0], [[-1.0]]))


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chosen", "old", "expected"),
    [
        ("sync", "auto", "auto", "none"),
        ("partial", "auto", "auto", "tis"),
        ("async", "auto", "auto", "tis"),
        ("one_step_off", "auto", "auto", "tis"),
        ("async", "none", "auto", "none"),
        ("partial", "auto", "rollout", "none"),
    ],
)
def test_the_preset_follows_the_schedule(schedule: str, chosen: str, old: str, expected: str) -> None:
    config = Config()
    config.schedule.name, config.algorithm.correction.preset = schedule, chosen
    config.algorithm.old_logprobs = old
    assert preset_of(config) == expected


def test_keys_override_the_preset() -> None:
    found = correction_of(CorrectionConfig(preset="icepop", bounds=[0.25, 4.0], outside="truncate"))
    assert (found.weight, found.bounds, found.outside) == ("token", (0.25, 4.0), "truncate")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bounds": [2.0]}, r"algorithm.correction.bounds=[2.0]: must be [low, high] with 0 <= low < high"),
        ({"bounds": [2.0, 1.0]}, r"algorithm.correction.bounds=[2.0, 1.0]: must be"),
        ({"bounds": [0.0, math.nan]}, r"algorithm.correction.bounds=[0.0, nan]: must be"),
        ({"reject": "token"}, "algorithm.correction.reject=token: needs algorithm.correction.reject_bounds"),
        ({"reject": "token", "reject_metric": "k3", "reject_bounds": [0.5, 2.0]}, "reject_metric=k3: a divergence"),
    ],
)  # fmt: skip
def test_corrections_that_can_t_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        correction_of(CorrectionConfig(**keys))
    assert message in str(caught.value)
