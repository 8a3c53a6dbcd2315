"""Group baselines: rewards of one prompt's samples -> advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPS = 1e-6
#: Rewards whose spread is below a few float32 roundings of the largest are equal: 0.1 + 0.2 is 0.3.
EQUAL_RTOL = 5e-7


def zero_variance_groups(rewards: Sequence[float], group_size: int) -> list[bool]:
    """Per group of ``group_size`` consecutive rewards, whether they are all equal up to rounding.

    Raises:
        ValueError: as :func:`group_advantages`.
    """
    return _flat(_table(rewards, group_size)).tolist()


def group_advantages(rewards: Sequence[float], group_size: int, kind: str) -> tuple[list[float], list[bool]]:
    """Advantages of consecutive groups, computed in float64.

    Args:
        rewards: one per sample, the samples of a prompt next to each other.
        group_size: samples per prompt.
        kind: group_std: (r - mean) / (std + 1e-6) with the sample standard deviation (GRPO,
            arXiv:2402.03300). group_mean: r - mean (Dr. GRPO, arXiv:2503.20783). leave_one_out: r minus the
            mean of the *others* (RLOO, arXiv:2402.14740): [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3].

    Returns:
        advantages, one per sample, and per group whether all its rewards are equal up to rounding (then its
        advantages are exactly 0).

    Raises:
        ValueError: group of one, rewards that are no whole number of groups, not finite, or unknown kind.
    """
    table = _table(rewards, group_size)
    flat = _flat(table)
    centred = np.where(flat[:, None], 0.0, table - table.mean(axis=1, keepdims=True))
    if kind == "group_std":
        advantages = centred / (table.std(axis=1, ddof=1, keepdims=True) + STD_EPS)
    elif kind == "group_mean":
        advantages = centred
    elif kind == "leave_one_out":
        advantages = centred * (group_size / (group_size - 1))
    else:
        raise ValueError(f"algorithm.advantage={kind}: must be group_std, group_mean or leave_one_out")
    return advantages.reshape(-1).tolist(), flat.tolist()


def _table(rewards: Sequence[float], group_size: int) -> np.ndarray:
    """float64 [groups, group_size]."""
    if group_size < 2:
        raise ValueError(f"rollout.samples_per_prompt={group_size}: a group baseline needs at least 2 samples")
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are no whole number of groups of {group_size}")
    table = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    if not np.isfinite(table).all():
        raise ValueError(f"reward of sample {int(np.flatnonzero(~np.isfinite(table))[0])} is not finite")
    return table


def _flat(table: np.ndarray) -> np.ndarray:
    """bool [groups]: no reward of the group differs from another."""
    return np.ptp(table, axis=1) <= EQUAL_RTOL * np.abs(table).max(axis=1)
