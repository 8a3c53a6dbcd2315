"""Rewards per token, GAE and the value loss: hand-worked values, and GAE against its definition as a sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridengine.algorithms.values import generalised_advantages, token_rewards, value_losses


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "lam", "advantages", "returns"),
    [
        ([0, 0, 1], [0.1, 0.2, 0.3], [1, 1, 1], 1.0, [0.9, 0.8, 0.7], [1, 1, 1]),
        ([0, 0, 1], [0.1, 0.2, 0.3], [1, 1, 1], 0.5, [0.325, 0.45, 0.7], [0.425, 0.65, 1]),
        ([0, 1, 0], [0, 0, 100], [1, 1, 0], 0.95, [0.95, 1, 0], [0.95, 1, 0]),
        # the masked token in the middle takes no time: as [0, 1] with values [0, 0]
        ([0, 0, 1], [0, 100, 0], [1, 0, 1], 0.95, [0.95, 0, 1], [0.95, 0, 1]),
    ],
    ids=["monte-carlo", "lambda", "masked-end", "masked-middle"],
)
def test_gae_by_hand(
    rewards: list[float],
    values: list[float],
    mask: list[int],
    lam: float,
    advantages: list[float],
    returns: list[float],
) -> None:
    found = generalised_advantages(rewards, values, [bool(m) for m in mask], gamma=1.0, lam=lam)
    assert found[0].tolist() == pytest.approx(advantages)
    assert found[1].tolist() == pytest.approx(returns)


def test_gae_is_the_weighted_sum_of_differences() -> None:
    """A_t = Σ_l (γλ)^l δ_{t+l}, over what is left when masked tokens are taken out."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        size = int(rng.integers(1, 12))
        rewards, values, mask = rng.normal(size=size), rng.normal(size=size), rng.random(size) < 0.7
        found, returns = generalised_advantages(rewards.tolist(), values.tolist(), mask.tolist(), gamma=0.97, lam=0.9)
        r, v = rewards[mask], values[mask]
        delta = r + 0.97 * np.append(v[1:], 0.0)[: len(v)] - v
        expected = [sum((0.97 * 0.9) ** i * d for i, d in enumerate(delta[t:])) for t in range(len(delta))]
        assert found[mask].tolist() == pytest.approx(expected)
        assert returns[mask].tolist() == pytest.approx((np.array(expected) + v).tolist())
        assert (found[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_gae_needs_as_many_of_each() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 values and 2 mask entries"):
        generalised_advantages([0, 1], [0.0], [True, True])


@pytest.mark.parametrize(("target", "expected"), [(0.0, 0.5), (1.0, 0.18)])
def test_value_clip(target: float, expected: float) -> None:
    """V = 1 is clipped to .4: (1 - 0)² / 2, and (.4 - 1)² / 2."""
    old, returns = torch.tensor([0.2]), torch.tensor([target])
    assert value_losses(torch.tensor([1.0]), old, returns, clip=0.2).item() == pytest.approx(expected)
    plain = value_losses(torch.tensor([1.0]), old, returns, clip=None)
    assert plain.item() == pytest.approx((1 - target) ** 2 / 2)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [(0.3, 0.3), (1.0, 0.0), (-1.0, -1.0)],
    ids=["within", "clipped-away-from-the-return", "on-the-other-side"],
)
def test_value_gradient(value: float, gradient: float) -> None:
    """Old .2, clip .2; returns 0, 2, 0: where the clipped loss is the larger there is no gradient."""
    target = 2.0 if value == 1.0 else 0.0
    leaf = torch.tensor([value], requires_grad=True)
    value_losses(leaf, torch.tensor([0.2]), torch.tensor([target]), clip=0.2).sum().backward()
    assert leaf.grad is not None and leaf.grad.item() == pytest.approx(gradient)


def test_rewards_per_token() -> None:
    """Reward 1 at the last unmasked token; KL .1 (k1) at each, times .5; nothing at the masked one."""
    mask = [True, True, False, True, False]
    found = token_rewards(1.0, mask, logprobs=[-1.0] * 5, ref_logprobs=[-1.1] * 5, kl_coef=0.5, estimator="k1")
    assert found.tolist() == pytest.approx([-0.05, -0.05, 0.0, 0.95, 0.0])
    assert token_rewards(1.0, mask).tolist() == [0, 0, 0, 1, 0]
    advantages, _ = generalised_advantages(found.tolist(), [0.0] * 5, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == pytest.approx([0.85, 0.9, 0, 0.95, 0])


@pytest.mark.parametrize(
    ("mask", "keys", "message"),
    [([False], {}, "without an unmasked token"), ([True], {"kl_coef": 0.1}, "kl_coef=0.1 needs the reference")],
)
def test_rewards_that_have_no_place(mask: list[bool], keys: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_rewards(1.0, mask, **keys)  # type: ignore[arg-type]
