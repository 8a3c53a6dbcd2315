"""Surrogates and KL estimators against values and gradients worked out by hand; the same for every cut of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import LossCounts, TokenBatch
from hybridengine.algorithms.registry import ALGORITHMS
from hybridengine.config import AlgorithmConfig, RolloutConfig
from hybridengine.config.compose import build, config_groups
from hybridengine.engines.train.batching import build_micro_batch, micro_batch_bins, partition
from hybridengine.types import Sample

LN2 = math.log(2.0)


def algorithm(name: str, **changes: Any) -> Algorithm:
    return ALGORITHMS[name](AlgorithmConfig(name=name, **changes), RolloutConfig(max_tokens=8))


def one_sequence(
    subject: Algorithm, deltas: list[float], advantage: float, *, logprob: float = -1.0
) -> tuple[float, list[float]]:
    """Loss and gradient of one response whose tokens have log π - log π_old = ``deltas``."""
    values = torch.full((len(deltas),), logprob, dtype=torch.float64, requires_grad=True)
    sample = Sample(
        prompt_ids=[1], response_ids=[2] * len(deltas), loss_mask=[True] * len(deltas),
        advantages=[advantage] * len(deltas), old_logprobs=[logprob - delta for delta in deltas],
    )  # fmt: skip
    micro = build_micro_batch([sample], [0], pad_id=0, packing=True)
    micro.old_logprobs = torch.tensor(sample.old_logprobs, dtype=torch.float64)
    micro.advantages = micro.advantages.double()
    loss = subject.loss_fn(LossCounts.of([sample]))(values, None, micro).loss
    loss.backward()
    assert values.grad is not None
    return loss.item(), values.grad.tolist()


@pytest.mark.parametrize(
    ("name", "changes", "deltas", "advantage", "loss", "gradient"),
    [
        # s = exp(mean[.1, .3]) = e^.2 = 1.22140, above 1.2; unclipped, each of 2 tokens has s / 2
        pytest.param("gspo", {"clip_high": 0.2}, [0.1, 0.3], 1.0, -1.2, [0.0, 0.0], id="gspo-clipped"),
        pytest.param("gspo", {"clip_high": 0.3}, [0.1, 0.3], 1.0, -1.22140, [-0.61070] * 2, id="gspo"),
        # A < 0 above the range: the larger loss is the unclipped one
        pytest.param("gspo", {}, [0.1, 0.3], -1.0, 1.22140, [0.61070] * 2, id="gspo-negative"),
        # -1.28 · 1 · (-1)
        pytest.param("cispo", {"clip_high": 0.28}, [LN2], 1.0, 1.28, [-1.28], id="cispo-clipped"),
        pytest.param("cispo", {"clip_high": 4.0}, [LN2], 1.0, 2.0, [-2.0], id="cispo"),
        pytest.param("cispo", {"clip_low": 0.2}, [-LN2], -1.0, -0.8, [0.8], id="cispo-low"),
        # σ(0) · 4 = 2; slope 4 · σ'(0) · ratio = 1
        pytest.param("sapo", {}, [0.0], 1.0, -2.0, [-1.0], id="sapo-on-policy"),
        # σ(0) · 4 / 1.05 = 1.90476
        pytest.param("sapo", {}, [0.0], -1.0, 1.90476, [1.0], id="sapo-on-policy-negative"),
        # 4 · σ(1) = 2.92423; 4 · σ(1) · σ(-1) · 2 = 1.57289
        pytest.param("sapo", {}, [LN2], 1.0, -2.92423, [-1.57289], id="sapo-ratio-2"),
        pytest.param("sapo", {"kwargs": {"tau_positive": 2.0}}, [LN2], 1.0, -1.76159, [-0.83995], id="sapo-tau"),
        # min(2, 1.28); dual clip: 3 · A bounds 4 · A
        pytest.param("grpo", {"clip_high": 0.28}, [LN2], 1.0, -1.28, [0.0], id="grpo-clip-higher"),
        pytest.param("grpo", {"clip_dual": 3.0}, [2 * LN2], -1.0, 3.0, [0.0], id="grpo-dual-clip"),
        pytest.param("grpo", {"clip_dual": 5.0}, [2 * LN2], -1.0, 4.0, [4.0], id="grpo-dual-clip-within"),
    ],
)
def test_by_hand(
    name: str, changes: dict[str, Any], deltas: list[float], advantage: float, loss: float, gradient: list[float]
) -> None:
    found, slope = one_sequence(algorithm(name, **changes), deltas, advantage)
    assert found == pytest.approx(loss, abs=6e-6)
    assert slope == pytest.approx(gradient, abs=6e-6)


def test_of_gspo_with_equal_advantages_the_sequence_form_has_the_same_gradient() -> None:
    """Gradient of -A · exp(mean Δ), by autograd through the mean."""
    deltas = torch.tensor([0.1, -0.3, 0.25], dtype=torch.float64, requires_grad=True)
    (-0.75 * deltas.mean().exp()).backward()
    _, gradient = one_sequence(
        algorithm("gspo", clip_high=9.0, loss_aggregation="seq-mean-token-mean"), deltas.tolist(), 0.75
    )
    assert deltas.grad is not None
    assert gradient == pytest.approx(deltas.grad.tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("delta", [-10_000.0, 10_000.0, 0.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_ratios_of_any_size_give_finite_gradients(name: str, delta: float, advantage: float) -> None:
    loss, gradient = one_sequence(algorithm(name), [delta, 0.0], advantage)
    assert math.isfinite(loss) and all(map(math.isfinite, gradient))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_every_algorithm_follows_the_policy_gradient(name: str) -> None:
    """Ratio 1: -A / tokens at each token, whatever the surrogate; and nothing is clipped."""
    subject = algorithm(name)
    _, gradient = one_sequence(subject, [0.0, 0.0], 0.5)
    assert gradient == pytest.approx([-0.25, -0.25], abs=1e-12)


@pytest.mark.parametrize("name", config_groups()["algorithm"])
def test_the_same_for_every_cut_and_equal_to_numerical_gradients(name: str) -> None:
    """Each configuration in conf/algorithm: micro-batches of any size on any number of ranks add up to one loss, whose
    gradient is that of central differences in float64 (away from the clip's corners) to 1e-6."""
    config = build(["model.path=m", "data.train=d", "reward.fn=math", f"algorithm={name}"])
    config.rollout.max_tokens = 8
    config.algorithm.clip_high += 0.05  # the tightest clip is 3e-4: a difference quotient needs room
    config.algorithm.clip_low = min(1.0, config.algorithm.clip_low + 0.05)
    subject = ALGORITHMS[config.algorithm.name](config.algorithm, config.rollout)
    g = torch.Generator().manual_seed(7)
    samples = []
    for i in range(7):
        length = int(torch.randint(1, 6, (1,), generator=g))
        old = (torch.randn(length, generator=g) * 0.4 - 1).tolist()
        samples.append(
            Sample(
                prompt_ids=[1] * (1 + i % 3), response_ids=[2] * length, loss_mask=[i != 2] * length,
                advantages=[float(torch.randn(1, generator=g))] * length, old_logprobs=old, rollout_logprobs=old,
            )
        )  # fmt: skip
    rows = [
        torch.tensor(s.old_logprobs).double() + 0.3 * torch.randn(len(s.response_ids), generator=g) for s in samples
    ]
    loss_fn = subject.loss_fn(LossCounts.of(samples))

    def total(rows: list[torch.Tensor], ranks: int, budget: int) -> torch.Tensor:
        parts = []
        for share in partition([s.length for s in samples], ranks):
            for part in micro_batch_bins([samples[i].length for i in share], budget):
                indices = [share[k] for k in part]
                micro = build_micro_batch(samples, indices, pad_id=0, packing=True)
                parts.append(loss_fn(torch.cat([rows[i] for i in indices]), None, micro).loss)
        return torch.stack(parts).sum()

    outcomes = []
    for ranks, budget in ((1, 1000), (1, 9), (2, 12), (4, 9)):
        leaves = [row.clone().requires_grad_() for row in rows]
        loss = total(leaves, ranks, budget)
        loss.backward()
        outcomes.append((loss.detach(), torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])))
    for loss, gradient in outcomes[1:]:
        torch.testing.assert_close(loss, outcomes[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-12, atol=1e-12)
    gradient = outcomes[0][1]
    assert gradient.abs().max() > 0
    if config.algorithm.name not in ("gspo", "cispo"):  # stop gradients: their values' slope is another
        step, position = 1e-6, 0
        for row in rows:
            for t in range(len(row)):
                before = row[t].item()
                row[t] = before + step
                above = total(rows, 1, 1000)
                row[t] = before - step
                slope = (above - total(rows, 1, 1000)) / (2 * step)
                row[t] = before
                assert slope.item() == pytest.approx(gradient[position].item(), abs=1e-6)
                position += 1


# -- KL ----------------------------------------------------------------------------------------------------------------


def kl(d: float, estimator: str, **kwargs: Any) -> tuple[float, float]:
    """Value and gradient by the policy's log-probability, at ref - policy = d."""
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    if estimator == "k3_ratio":
        kwargs["ratio"] = (policy - policy.detach()).exp()
    value = kl_estimate(policy, policy.detach() + d, estimator, **kwargs)
    value.backward()
    assert policy.grad is not None
    return value.item(), policy.grad.item()


@pytest.mark.parametrize(
    ("d", "estimator", "clamp", "value", "gradient"),
    [
        pytest.param(-30.0, "k3", 5.0, 29.0, 1.0, id="drifted-up"),  # e^-30 - 1 + 30; 1 - e^-30: it is still pulled
        pytest.param(2.0, "k3", 5.0, math.exp(2) - 3, 1 - math.exp(2), id="within"),
        # e^5 - 1 + 5 e^5 - 10 = 879.5; the slope stays at 1 - e^5
        pytest.param(10.0, "k3", 5.0, 6 * math.exp(5) - 11, 1 - math.exp(5), id="drifted-down"),
        pytest.param(2.0, "k2", 5.0, 2.0, -2.0, id="k2"),
        pytest.param(2.0, "k1", 5.0, -2.0, 1.0, id="k1"),
        # ratio · k3: value k3, gradient k3 + (1 - e^d) = -d: that of k2
        pytest.param(2.0, "k3_ratio", 5.0, math.exp(2) - 3, -2.0, id="k3_ratio"),
    ],
)
def test_kl_values_and_gradients(d: float, estimator: str, clamp: float, value: float, gradient: float) -> None:
    assert kl(d, estimator, clamp=clamp) == pytest.approx((value, gradient))


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", "zero"), ("k2", "forward"), ("k3", "reverse"), ("k3_ratio", "forward")]
)
def test_whose_gradient_each_estimator_has(estimator: str, expected: str) -> None:
    """Expectation over a policy's own samples, with softmax logits: 0, or the gradient of one of the divergences."""
    torch.manual_seed(0)
    logits, q = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64).softmax(0)
    policy = logits.log_softmax(0)
    ratio = (policy - policy.detach()).exp()
    estimates = kl_estimate(policy, q.log(), estimator, ratio=ratio)
    (gradient,) = torch.autograd.grad((policy.exp().detach() * estimates).sum(), logits)
    p = logits.softmax(0)
    exact = {"forward": (p * (p / q).log()).sum(), "reverse": (q * (q / p).log()).sum(), "zero": 0 * p.sum()}
    (right,) = torch.autograd.grad(exact[expected], logits)
    torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-12)


def test_the_largest_kl_is_a_maximum_over_micro_batches() -> None:
    """d = 1 and 3 in two micro-batches: kl_max is the second's, and not their sum."""
    from hybridengine.engines.train.losses import LossSum

    subject = algorithm("grpo", kl_coef=0.1)
    samples = [
        Sample(prompt_ids=[1], response_ids=[2], loss_mask=[True], advantages=[1.0], ref_logprobs=[-1.0 + d])
        for d in (1.0, 3.0)
    ]
    total = LossSum(subject.loss_fn(LossCounts.of(samples)))
    for i in range(2):
        micro = build_micro_batch(samples, [i], pad_id=0, packing=True)
        total.add(torch.tensor([-1.0], requires_grad=True), None, micro)
    found = subject.metrics([{name: float(value) for name, value in total._metrics.items()}])
    assert found["kl_max"] == pytest.approx(math.exp(3) - 4, rel=1e-6)
    assert found["kl"] == pytest.approx((math.exp(3) - 4 + math.exp(1) - 2) / 2, rel=1e-6)


def test_a_batch_s_masked_tokens_are_no_part_of_a_sequence_s_ratio() -> None:
    from hybridengine.algorithms.losses import sequence_ratio

    batch = TokenBatch(
        logprobs=torch.tensor([0.2, 0.0, 0.6]), old=torch.tensor([0.0, 0.0, 0.0]), advantages=torch.ones(3),
        mask=torch.tensor([True, False, True]), sequence_ids=torch.tensor([0, 0, 1]),
    )  # fmt: skip
    assert sequence_ratio(batch).tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(0.6)])
