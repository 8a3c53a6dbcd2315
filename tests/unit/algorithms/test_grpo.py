"""GRPO's samples and loss against an independent reference in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridengine.algorithms.grpo import GRPO
from hybridengine.algorithms.losses import LossCounts
from hybridengine.config import AlgorithmConfig, CorrectionConfig, RolloutConfig
from hybridengine.engines.train.batching import build_micro_batch, micro_batch_bins, partition
from hybridengine.types import Prompt, Sample, Trajectory


def trajectory(prompt: int, sample: int, length: int, reward: float | None, *, truncated: bool = False) -> Trajectory:
    return Trajectory(
        prompt=Prompt(index=prompt, token_ids=[1, 2]), sample_index=sample, token_ids=list(range(3, 3 + length)),
        logprobs=[-1.0] * length, versions=[0] * length, truncated=truncated, reward=reward,
        rewards={} if reward is None else {"r": reward},
    )  # fmt: skip


def grpo(**changes: Any) -> GRPO:
    return GRPO(AlgorithmConfig(**changes), RolloutConfig(samples_per_prompt=2, max_tokens=8))


def test_samples_masks_and_metrics() -> None:
    trajectories = [
        trajectory(0, 0, 2, 1.0), trajectory(0, 1, 4, 0.0, truncated=True),
        trajectory(1, 0, 3, 1.0), trajectory(1, 1, 3, 1.0),
    ]  # fmt: skip
    samples, metrics = grpo(mask_truncated=True, drop_zero_variance=True).samples(trajectories)
    assert [all(s.loss_mask) for s in samples] == [True, False, False, False]
    assert metrics["frac_reward_zero_std"] == 0.5 and metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/mean_length"] == 3 and metrics["rewards/r"] == 0.75
    kept, _ = grpo().samples(trajectories)
    assert all(all(s.loss_mask) for s in kept)


def test_kl_in_reward_lowers_the_advantage_of_what_moved() -> None:
    trajectories = [trajectory(0, 0, 2, 1.0), trajectory(0, 1, 2, 1.0)]
    references = [[-1.0, -1.0], [-2.0, -2.0]]
    samples, metrics = grpo(kl_coef=0.1, kl_in="reward", kl_estimator="k1", advantage="group_mean").samples(
        trajectories, references
    )
    assert [s.advantages[0] for s in samples] == pytest.approx([0.1, -0.1])
    assert samples[0].ref_logprobs is None and metrics["reward"] == 1.0


def test_kl_in_reward_does_not_hide_zero_variance() -> None:
    """Equal rewards stay a zero-variance group although the penalties of its samples differ."""
    trajectories = [trajectory(0, 0, 2, 1.0), trajectory(0, 1, 2, 1.0)]
    algorithm = grpo(kl_coef=0.1, kl_in="reward", kl_estimator="k1", drop_zero_variance=True)
    samples, metrics = algorithm.samples(trajectories, [[-1.0, -1.0], [-2.0, -2.0]])
    assert metrics["frac_reward_zero_std"] == 1.0
    assert not any(any(s.loss_mask) for s in samples)


def test_dropped_groups_leave_the_count() -> None:
    """A group without a signal changes neither the loss of the others nor their gradient."""
    signal = [trajectory(0, 0, 2, 1.0), trajectory(0, 1, 4, 0.0)]
    silent = [trajectory(1, 0, 5, 1.0), trajectory(1, 1, 5, 1.0)]
    gradients = []
    for trajectories in (signal, signal + silent):
        algorithm = grpo(drop_zero_variance=True)
        samples, _ = algorithm.samples(trajectories)
        micro = build_micro_batch(samples, list(range(len(samples))), pad_id=0, packing=True)
        values = torch.full((len(micro.targets),), -1.0, requires_grad=True)
        algorithm.loss_fn(LossCounts.of(samples))(values, None, micro).loss.backward()
        assert values.grad is not None
        gradients.append(values.grad[:6])
    assert torch.equal(*gradients) and gradients[0].abs().min() > 0


@pytest.mark.parametrize(
    ("trajectories", "changes", "message"),
    [
        pytest.param([trajectory(0, 0, 2, 1.0)] * 3, {}, "no whole number", id="incomplete-group"),
        pytest.param([trajectory(0, 0, 2, 1.0), trajectory(1, 0, 2, 1.0)], {}, r"mix prompts \[0, 1\]", id="mixed"),
        pytest.param([trajectory(4, 0, 2, None)] * 2, {}, "prompt 4 has a response without", id="unscored"),
        pytest.param([trajectory(0, 0, 2, 1.0)] * 2, {"kl_coef": 0.1}, "kl_coef=0.1 needs", id="no-reference"),
    ],
)
def test_bad_rollouts_are_refused(trajectories: list[Trajectory], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo(**changes).samples(trajectories)


def random_samples(seed: int, n: int = 6) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)
    found = []
    for i in range(n):
        length = int(torch.randint(1, 6, (1,), generator=g))
        draw = lambda size=length: (torch.randn(size, generator=g) * 0.4 - 1).tolist()  # noqa: E731
        found.append(
            Sample(
                prompt_ids=[1] * (1 + i % 3),
                response_ids=[2] * length,
                loss_mask=[i != 2] * length,
                advantages=[float(torch.randn(1, generator=g))] * length,
                rollout_logprobs=draw(),
                old_logprobs=draw(),
                ref_logprobs=draw(),
            )  # fmt: skip
        )
    return found


def reference_loss(samples: list[Sample], logprobs: list[list[float]], config: AlgorithmConfig, length: int) -> float:
    """One token after the other, straight from the papers' formulas."""
    per_sequence: list[list[float]] = []
    for sample, row in zip(samples, logprobs, strict=True):
        losses = []
        for t, lp in enumerate(row):
            if not sample.loss_mask[t]:
                continue
            a = sample.advantages[t]
            old = (sample.rollout_logprobs if config.old_logprobs == "rollout" else sample.old_logprobs)[t]
            ratio = math.exp(lp - old)
            loss = -min(ratio * a, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * a)
            if config.clip_dual and a < 0:
                loss = min(loss, -config.clip_dual * a)
            if config.correction.preset == "tis":
                loss *= min(math.exp(old - sample.rollout_logprobs[t]), config.correction.bounds[1])
            d = sample.ref_logprobs[t] - lp
            loss += config.kl_coef * {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[config.kl_estimator]
            losses.append(loss)
        if losses:
            per_sequence.append(losses)
    flat = [x for losses in per_sequence for x in losses]
    n = len(per_sequence)
    return {
        "token-mean": sum(flat) / len(flat),
        "seq-mean-token-mean": sum(sum(x) / len(x) for x in per_sequence) / n,
        "seq-mean-token-sum": sum(flat) / n,
        "constant-length": sum(flat) / (n * length),
    }[config.loss_aggregation]


def numeric_gradient(
    samples: list[Sample], logprobs: list[list[float]], config: AlgorithmConfig, length: int, step: float = 1e-6
) -> list[float]:
    """Central differences of the reference loss, token by token."""
    gradient = []
    for row in logprobs:
        for t, value in enumerate(row):
            row[t] = value + step
            above = reference_loss(samples, logprobs, config, length)
            row[t] = value - step
            gradient.append((above - reference_loss(samples, logprobs, config, length)) / (2 * step))
            row[t] = value
    return gradient


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip-higher": {"clip_low": 0.1, "clip_high": 0.4},
    "dual": {"clip_dual": 1.1},
    "old-from-rollout": {"old_logprobs": "rollout", "clip_low": 0.5},
    "tis": {"correction": CorrectionConfig(preset="tis", bounds=[0.0, 1.2])},
    "kl-k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "kl-k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "kl-k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "seq-mean": {"loss_aggregation": "seq-mean-token-mean"},
    "seq-sum": {"loss_aggregation": "seq-mean-token-sum"},
    "constant": {"loss_aggregation": "constant-length"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradient_for_any_cut(changes: dict[str, Any]) -> None:
    """Equal to the reference in one piece, over micro-batches and over ranks; so is the gradient."""
    config = AlgorithmConfig(**changes)
    algorithm = GRPO(config, RolloutConfig(samples_per_prompt=2, max_tokens=8))
    samples = random_samples(3)
    logprobs = [
        torch.tensor(s.old_logprobs) + 0.3 * torch.sin(torch.arange(len(s.response_ids)) + 1.0) for s in samples
    ]
    expected = reference_loss(samples, [row.tolist() for row in logprobs], config, 8)
    loss_fn = algorithm.loss_fn(LossCounts.of(samples))
    gradients = []
    for ranks, budget in ((1, 1000), (1, 9), (2, 12), (4, 9)):
        total = 0.0
        leaves = [row.clone().requires_grad_() for row in logprobs]
        for share in partition([s.length for s in samples], ranks):
            for part in micro_batch_bins([samples[i].length for i in share], budget) + [[]]:
                indices = [share[k] for k in part]
                micro = build_micro_batch(samples, indices, pad_id=0, packing=True)
                values = torch.cat([leaves[i] for i in indices]) if indices else torch.zeros(1, requires_grad=True)
                result = loss_fn(values, None, micro)
                result.loss.backward()
                total += result.loss.item()
        assert total == pytest.approx(expected, abs=1e-6)
        gradients.append(torch.cat([leaf.grad for leaf in leaves]))
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
    numeric = numeric_gradient(samples, [row.tolist() for row in logprobs], config, 8)
    torch.testing.assert_close(gradients[0], torch.tensor(numeric), rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 0


def test_without_old_logprobs_the_step_is_on_policy() -> None:
    samples = random_samples(1)
    for s in samples:
        s.old_logprobs = s.ref_logprobs = None
    micro = build_micro_batch(samples, list(range(len(samples))), pad_id=0, packing=True)
    values = torch.full((len(micro.targets),), -1.0, requires_grad=True)
    result = grpo().loss_fn(LossCounts.of(samples))(values, None, micro)
    result.loss.backward()
    tokens = result.metrics["tokens"]
    assert result.metrics["ratio"] == tokens
    expected = torch.where(micro.loss_mask, -micro.advantages, torch.zeros(())) / tokens
    torch.testing.assert_close(values.grad, expected)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_masked_out_tokens_may_be_anything(field: str, bad: float, estimator: str) -> None:
    """Sample 2 is not trained on: whatever its values are, loss, metrics and gradient stay as they were."""
    algorithm = grpo(kl_coef=0.3, kl_estimator=estimator, correction=CorrectionConfig(preset="tis"), entropy_coef=0.1)
    outcomes = []
    for value in (-1.0, bad):
        samples = random_samples(3)
        samples[2].old_logprobs = samples[2].ref_logprobs = samples[2].rollout_logprobs = [-1.0] * len(
            samples[2].response_ids
        )
        if field not in ("logprobs", "entropy"):
            setattr(samples[2], field, [value] * len(samples[2].response_ids))
        micro = build_micro_batch(samples, list(range(len(samples))), pad_id=0, packing=True)
        values = torch.full((len(micro.targets),), -1.2)
        entropy = torch.ones_like(values)
        if field in ("logprobs", "entropy"):
            (values if field == "logprobs" else entropy)[~micro.loss_mask] = value
        values.requires_grad_()
        result = algorithm.loss_fn(LossCounts.of(samples))(values, entropy, micro)
        result.loss.backward()
        outcomes.append((result, values.grad))
    (expected, expected_grad), (found, grad) = outcomes
    assert torch.isfinite(found.loss) and torch.equal(found.loss, expected.loss)
    assert found.metrics == expected.metrics
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize(
    "changes", [{}, {"kl_coef": 0.1}, {"correction": CorrectionConfig(preset="tis")}], ids=["plain", "kl", "tis"]
)
def test_a_dummy_reports_the_same_metrics_and_a_connected_zero(changes: dict[str, Any]) -> None:
    """Ranks add their metrics up in one all-reduce: a rank of dummies must have the same names."""
    samples = random_samples(1)
    if "kl_coef" not in changes:
        for s in samples:
            s.ref_logprobs = None
    loss_fn = grpo(**changes).loss_fn(LossCounts.of(samples))
    real = build_micro_batch(samples, [0, 1], pad_id=0, packing=True)
    dummy = build_micro_batch(samples, [], pad_id=0, packing=True)
    values = torch.tensor([-1.0], requires_grad=True)
    result = loss_fn(values, None, dummy)
    assert result.metrics.keys() == loss_fn(torch.full((len(real.targets),), -1.0), None, real).metrics.keys()
    assert all(value == 0 for value in result.metrics.values())
    result.loss.backward()
    assert values.grad is not None and values.grad.tolist() == [0.0]


def test_missing_reference_logprobs_are_refused() -> None:
    samples = random_samples(1)
    for s in samples:
        s.ref_logprobs = None
    micro = build_micro_batch(samples, [0], pad_id=0, packing=True)
    with pytest.raises(ValueError, match="kl_coef=0.1 needs"):
        grpo(kl_coef=0.1).loss_fn(LossCounts.of(samples))(torch.zeros(len(micro.targets)), None, micro)


def test_metrics_are_means_over_all_tokens_of_all_steps() -> None:
    """Steps of 3 and 1 tokens: sums over 4 tokens, the loss a mean over the two steps."""
    steps = [
        {"loss": 1.0, "tokens": 3.0, "ratio": 3.0, "clip_ratio/low": 1.0},
        {"loss": 2.0, "tokens": 1.0, "ratio": 2.0, "clip_ratio/low": 0.0},
    ]
    assert grpo().metrics(steps) == {"loss": 1.5, "ratio": 1.25, "clip_ratio/low": 0.25}


def test_approx_kl_is_of_the_old_policy_from_the_new() -> None:
    """k3 of KL(old‖new) where new - old = 1: e - 1 - 1; of KL(new‖old) it would be 1/e."""
    sample = Sample(
        prompt_ids=[1], response_ids=[2] * 2, loss_mask=[True] * 2, advantages=[1.0, -1.0],
        rollout_logprobs=[-2.0] * 2, old_logprobs=[-2.0] * 2,
    )  # fmt: skip
    micro = build_micro_batch([sample], [0], pad_id=0, packing=True)
    algorithm = grpo()
    result = algorithm.loss_fn(LossCounts.of([sample]))(torch.tensor([-1.0, -1.0]), None, micro)
    found = algorithm.metrics([{name: float(value) for name, value in result.metrics.items()}])
    assert found["approx_kl"] == pytest.approx(math.e - 2)


def test_clip_fractions_count_each_side() -> None:
    """Ratios e^±1 with advantages ±1: only A < 0 below and A > 0 above are clipped, one token each of four."""
    sample = Sample(
        prompt_ids=[1], response_ids=[2] * 4, loss_mask=[True] * 4, advantages=[1.0, -1.0, 1.0, -1.0],
        rollout_logprobs=[-2.0] * 4, old_logprobs=[-2.0] * 4,
    )  # fmt: skip
    micro = build_micro_batch([sample], [0], pad_id=0, packing=True)
    values = torch.tensor([-1.0, -1.0, -3.0, -3.0], requires_grad=True)
    algorithm = grpo()
    result = algorithm.loss_fn(LossCounts.of([sample]))(values, None, micro)
    found = algorithm.metrics([{name: float(value) for name, value in result.metrics.items()}])
    assert found["clip_ratio/low"] == found["clip_ratio/high"] == 0.25
    result.loss.backward()
    assert values.grad is not None and (values.grad != 0).tolist() == [False, True, True, False]


def test_entropy_bonus_lowers_the_loss() -> None:
    samples = random_samples(1)
    micro = build_micro_batch(samples, list(range(len(samples))), pad_id=0, packing=True)
    values, entropy = torch.full((len(micro.targets),), -1.0), torch.full((len(micro.targets),), 2.0)
    counts = LossCounts.of(samples)
    with_bonus = grpo(entropy_coef=0.1).loss_fn(counts)(values, entropy, micro).loss
    without = grpo().loss_fn(counts)(values, None, micro).loss
    assert (without - with_bonus).item() == pytest.approx(0.2, abs=1e-6)


def test_samples_with_a_logprob_that_is_no_number_are_left_out_and_counted() -> None:
    algorithm = GRPO(AlgorithmConfig(), RolloutConfig(samples_per_prompt=2))
    prompt = Prompt(index=0, token_ids=[1])
    group = [
        Trajectory(
            prompt=prompt, sample_index=k, token_ids=[5, 6], logprobs=logprobs, versions=[0, 0], truncated=False,
            reward=float(k), rewards={"r": float(k)},
        )
        for k, logprobs in enumerate(([-1.0, -1.0], [-1.0, math.nan]))
    ]  # fmt: skip
    samples, metrics = algorithm.samples(group)
    assert [sample.loss_mask for sample in samples] == [[True, True], [False, False]]
    assert metrics["completions/unsound"] == 1.0
