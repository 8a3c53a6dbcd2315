"""What a rollout looks like, before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from hybridengine.types import Trajectory


def is_sound(trajectory: Trajectory) -> bool:
    """Whether every log-probability is a number: what an engine drew from NaN logits is not trained on."""
    return all(map(math.isfinite, trajectory.logprobs))


def rollout_metrics(trajectories: Sequence[Trajectory], flat: Sequence[bool], group_size: int) -> dict[str, float]:
    """Means over scored trajectories, ordered by prompt. ``flat``: per group, whether its rewards are all equal."""
    count = len(trajectories)
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    lengths = [len(t.token_ids) for t in trajectories]
    names = sorted(set(chain.from_iterable(t.rewards for t in trajectories)))
    metrics = {
        "reward": rewards.mean().item(),
        "reward_std": rewards.view(-1, group_size).std(dim=1).mean().item(),
        "frac_reward_zero_std": sum(flat) / len(flat),
        "completions/mean_length": sum(lengths) / count,
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/unsound": float(sum(not is_sound(t) for t in trajectories)),
        "completions/clipped_ratio": sum(t.truncated for t in trajectories) / count,
    }
    for name in names:
        values = [t.rewards[name] for t in trajectories if name in t.rewards]
        metrics[f"rewards/{name}"] = sum(values) / len(values)
    return metrics
