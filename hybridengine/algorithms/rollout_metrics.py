"""What a rollout looks like, before anything is trained on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from hybridengine.algorithms.advantages import Rewards
from hybridengine.types import Trajectory


def is_sound(trajectory: Trajectory) -> bool:
    """Whether every log-probability is a number: what an engine drew from NaN logits is not trained on."""
    return all(map(math.isfinite, trajectory.logprobs))


def rollout_metrics(
    trajectories: Sequence[Trajectory], scored: Rewards, greedy_rewards: Sequence[float] | None = None
) -> dict[str, float]:
    """Means over scored trajectories, ordered by prompt; ``scored``: their rewards before any penalty.

    What compares the samples of a prompt is left out where there is one.
    """
    count, size = len(trajectories), scored.table.shape[1]
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    lengths = [len(t.token_ids) for t in trajectories]
    metrics = {
        "reward": rewards.mean().item(),
        "completions/mean_length": sum(lengths) / count,
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/unsound": float(sum(not is_sound(t) for t in trajectories)),
        "completions/clipped_ratio": sum(t.truncated for t in trajectories) / count,
    }
    if size > 1:
        metrics["reward_std"] = rewards.view(-1, size).std(dim=1).mean().item()
        metrics["frac_reward_zero_std"] = sum(scored.flat.tolist()) / len(scored.flat)
        metrics["completions/lone_survivors"] = float(scored.lone_survivors)
    if greedy_rewards is not None:
        metrics["reward_greedy"] = sum(greedy_rewards) / len(greedy_rewards)
    for name in sorted(set(chain.from_iterable(t.rewards for t in trajectories))):
        values = [t.rewards[name] for t in trajectories if name in t.rewards]
        metrics[f"rewards/{name}"] = sum(values) / len(values)
    return metrics
