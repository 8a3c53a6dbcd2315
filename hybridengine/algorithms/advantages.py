"""Baselines without a critic: rewards of one prompt's samples, or of a batch, -> advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-6
#: Rewards whose spread is below a few float32 roundings of the largest are equal: 0.1 + 0.2 is 0.3.
EQUAL_RTOL = 5e-7

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rewards:
    """A batch: G prompts with n samples each.

    Attributes:
        table: float64 [G, n]; what is not kept may be anything.
        kept: bool [G, n]: samples that the baseline sees, all but rejected and unsound ones.
        flat: bool [G]: no kept reward of the group differs from another; so is a group with one or none left.
        greedy: float64 [G], reward of the prompt's greedy sample, where the baseline asks for it.
    """

    table: Table
    kept: NDArray[np.bool_]
    flat: NDArray[np.bool_]
    greedy: Table | None = None

    @classmethod
    def of(
        cls,
        rewards: Sequence[float],
        group_size: int,
        *,
        kept: Sequence[bool] | None = None,
        greedy: Sequence[float] | None = None,
    ) -> Rewards:
        """From one reward per sample, the samples of a prompt next to each other.

        Raises:
            ValueError: no whole number of groups, or a kept reward that is not finite.
        """
        if len(rewards) % group_size:
            raise ValueError(f"{len(rewards)} rewards are no whole number of groups of {group_size}")
        table = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
        mask = np.ones_like(table, dtype=bool) if kept is None else np.asarray(kept).reshape(table.shape)
        if (bad := np.flatnonzero(mask & ~np.isfinite(table))).size:
            raise ValueError(f"reward of sample {int(bad[0])} is not finite")
        flat = np.array([_equal(row[keep]) for row, keep in zip(table, mask, strict=True)])
        return cls(table, mask, flat, None if greedy is None else np.asarray(greedy, dtype=np.float64))

    @property
    def lone_survivors(self) -> int:
        """Samples whose whole group, but for them, was rejected."""
        return int((self.kept.sum(axis=1) == 1).sum()) if self.table.shape[1] > 1 else 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """How advantages [G, n] come from rewards; 0 where a sample is not kept.

    Attributes:
        summary: one line for the documentation.
        min_samples: the fewest samples per prompt that it works with.
        needs_greedy: it compares with a greedy sample of each prompt.
    """

    compute: Callable[[Rewards], Table]
    summary: str
    min_samples: int = 2
    needs_greedy: bool = False


def group_std(rewards: Rewards) -> Table:
    """(r - mean) / (std + 1e-6) within the group, with the sample standard deviation (GRPO, arXiv:2402.03300)."""
    return _by_group(rewards, lambda rows: _centred(rows) / (rows.std(axis=1, ddof=1, keepdims=True) + STD_EPS))


def group_mean(rewards: Rewards) -> Table:
    """r - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    return _by_group(rewards, _centred)


def leave_one_out(rewards: Rewards) -> Table:
    """r - mean of the *others* of the group (RLOO, arXiv:2402.14740): [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3]."""
    return _by_group(rewards, lambda rows: _centred(rows) * (rows.shape[1] / (rows.shape[1] - 1)))


def batch_std(rewards: Rewards) -> Table:
    """Whitened over the batch (REINFORCE++, arXiv:2501.03262): [1, 0, 0, 1] -> [1, -1, -1, 1].

    Mean and population standard deviation over kept samples, one weight each whatever their length.
    """
    found = np.zeros_like(rewards.table)
    values = rewards.table[rewards.kept]
    if not _equal(values):
        found[rewards.kept] = (values - values.mean()) / values.std()
    return found


def group_mean_batch_std(rewards: Rewards) -> Table:
    """Centred within the group, then scaled to variance 1 over the batch (REINFORCE++ with a baseline).

    [[1, 0], [1, 1]] -> [[1.41421, -1.41421], [0, 0]]: centred [.5, -.5, 0, 0], population variance 1/8.
    """
    centred = group_mean(rewards)
    spread = np.sqrt(np.square(centred[rewards.kept]).mean()) if rewards.kept.any() else 0.0
    return centred / spread if spread else centred


def greedy(rewards: Rewards) -> Table:
    """r - r of the prompt's greedy sample (ReMax, arXiv:2310.10505): [1, 0] with greedy 1 -> [0, -1]."""
    if rewards.greedy is None:
        raise ValueError("algorithm.advantage=greedy needs the rewards of greedy samples, one per prompt")
    return np.where(rewards.kept, rewards.table - rewards.greedy[:, None], 0.0)


ADVANTAGES: dict[str, Baseline] = {
    "group_std": Baseline(group_std, "standardised within the prompt's group (GRPO)"),
    "group_mean": Baseline(group_mean, "minus the group's mean (Dr. GRPO)"),
    "leave_one_out": Baseline(leave_one_out, "minus the mean of the group's others (RLOO)"),
    "batch_std": Baseline(batch_std, "standardised over the batch (REINFORCE++)", min_samples=1),
    "group_mean_batch_std": Baseline(
        group_mean_batch_std, "minus the group's mean, standardised over the batch (REINFORCE++ with a baseline)"
    ),
    "greedy": Baseline(greedy, "minus the reward of a greedy sample (ReMax)", min_samples=1, needs_greedy=True),
}


def baseline_of(kind: str) -> Baseline:
    """Raises ValueError for a baseline that there isn't."""
    if kind not in ADVANTAGES:
        raise ValueError(f"algorithm.advantage={kind}: must be one of {' | '.join(ADVANTAGES)}")
    return ADVANTAGES[kind]


def group_advantages(rewards: Rewards, kind: str) -> Table:
    """Advantages [G, n] in float64 by a baseline's name; exactly 0 in groups of equal rewards where it is a group's.

    Raises:
        ValueError: unknown kind, groups that are too small for it, or greedy rewards missing.
    """
    baseline, size = baseline_of(kind), rewards.table.shape[1]
    if size < baseline.min_samples:
        raise ValueError(
            f"rollout.samples_per_prompt={size}: algorithm.advantage={kind} compares the samples of one prompt; set it "
            f"to {baseline.min_samples} or more"
        )
    return baseline.compute(rewards)


def _by_group(rewards: Rewards, formula: Callable[[Table], Table]) -> Table:
    """``formula`` of whole groups [G, n] at once, and of what is left of the others [1, kept] one by one.

    0 in flat groups, of which no estimate can tell one sample from another.
    """
    found = np.zeros_like(rewards.table)
    whole = rewards.kept.all(axis=1) & ~rewards.flat
    if whole.any():
        found[whole] = formula(rewards.table[whole])
    for group in np.flatnonzero(~whole & ~rewards.flat):
        kept = rewards.kept[group]
        found[group, kept] = formula(rewards.table[group, kept][None])[0]
    return found


def _centred(rows: Table) -> Table:
    return rows - rows.mean(axis=1, keepdims=True)


def _equal(values: Table) -> bool:
    """Whether all are equal up to rounding; of none or one, that they are."""
    return values.size < 2 or bool(np.ptp(values) <= EQUAL_RTOL * np.abs(values).max())
