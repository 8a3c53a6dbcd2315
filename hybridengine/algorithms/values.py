"""Parts of PPO that need values: rewards per token, generalised advantages, the clipped value loss.

Shape legend: T tokens of one response, R response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import MAX_LOG_RATIO
from hybridengine.types import Sample

Floats = Sequence[float] | NDArray[np.float64]


def token_rewards(
    reward: float,
    mask: Sequence[bool],
    *,
    logprobs: Sequence[float] | None = None,
    ref_logprobs: Sequence[float] | None = None,
    kl_coef: float = 0.0,
    estimator: str = "k1",
    clamp: float = MAX_LOG_RATIO,
) -> NDArray[np.float64]:
    """float64 [T]: ``reward`` at the last unmasked token, and at each -kl_coef · KL_t (arXiv:1909.08593).

    Reward 1, three tokens, KL .1 each at kl_coef .5: [-.05, -.05, .95]. Masked tokens (a tool's answer) have 0.

    Args:
        logprobs, ref_logprobs: [T], of the policy that sampled and of the reference; needed with ``kl_coef``.

    Raises:
        ValueError: no token is unmasked, or ``kl_coef`` without both log-probabilities.
    """
    keep = np.asarray(mask, dtype=bool)
    if not keep.any():
        raise ValueError("a response without an unmasked token has no place for its reward")
    found = np.zeros(len(keep))
    if kl_coef:
        if logprobs is None or ref_logprobs is None:
            raise ValueError(f"algorithm.kl_coef={kl_coef} needs the reference model's log-probabilities")
        policy, reference = (torch.tensor(row, dtype=torch.float64) for row in (logprobs, ref_logprobs))
        kl = kl_estimate(policy, reference, estimator, clamp=clamp).numpy()
        found = np.where(keep, -kl_coef * kl, 0.0)
    found[np.flatnonzero(keep)[-1]] += reward
    return found


def generalised_advantages(
    rewards: Floats, values: Sequence[float], mask: Sequence[bool], *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """GAE (arXiv:1506.02438, eq. 16) of one response: advantages and returns, float64 [T], 0 at masked tokens.

    δ_t = r_t + γ V_{t+1} - V_t and A_t = δ_t + γ λ A_{t+1}, where t+1 is the next *unmasked* token: value and advantage
    are carried over masked ones, which take no step of time. Returns are A + V.

        r          v              mask     γ, λ     A
        [0, 0, 1]  [.1, .2, .3]   1, 1, 1  1, 1     [.9, .8, .7]
        [0, 0, 1]  [.1, .2, .3]   1, 1, 1  1, .5    [.325, .45, .7]    returns [.425, .65, 1]
        [0, 1, 0]  [0, 0, 100]    1, 1, 0  1, .95   [.95, 1, -]

    Args:
        rewards: [T], per token; those of masked tokens don't count.
        values: [T], of the state before each token.

    Raises:
        ValueError: not equally many of each.
    """
    if not len(rewards) == len(values) == len(mask):
        raise ValueError(
            f"{len(rewards)} rewards, {len(values)} values and {len(mask)} mask entries: must be equally many"
        )
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages, returns


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """Per token ½ max((V - R)², (clip(V, V_old ± clip) - R)²) [R]; without a clip ½ (V - R)².

    V = 1, V_old = .2, clip .2: return 0 -> .5, return 1 -> .18 (the clipped value .4 is the further off).
    """
    losses = (values - returns).square()
    if clip is not None:
        clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        losses = torch.maximum(losses, (clipped - returns).square())
    return 0.5 * losses


def explained_variance(samples: Sequence[Sample]) -> dict[str, float]:
    """How good the critic was before it is trained on these: 1 - Var(returns - values) / Var(returns) over trained
    tokens, at most 1 and 0 for a constant; and the means of both. Left out where all returns are equal."""
    rows = [np.array([s.values, s.returns], dtype=float)[:, np.array(s.loss_mask, dtype=bool)] for s in samples]
    values, returns = np.concatenate(rows, axis=1) if rows else np.zeros((2, 0))
    if not len(returns):
        return {}
    found = {"critic/values": float(values.mean()), "critic/returns": float(returns.mean())}
    if (spread := returns.var()) > 1e-12:
        found["critic/explained_variance"] = float(1 - (returns - values).var() / spread)
    return found
