"""Trajectories between ranks: compact arrays instead of pickled lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from hybridengine.types import Prompt, Trajectory


def pack(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Numbers of all trajectories in flat arrays; prompts by their index only (every rank has them)."""
    return {
        "prompt": np.array([t.prompt.index for t in trajectories], dtype=np.int64),
        "sample": np.array([t.sample_index for t in trajectories], dtype=np.int32),
        "length": np.array([len(t.token_ids) for t in trajectories], dtype=np.int32),
        "tokens": np.array([x for t in trajectories for x in t.token_ids], dtype=np.int32),
        "logprobs": np.array([x for t in trajectories for x in t.logprobs], dtype=np.float32),
        "versions": np.array([x for t in trajectories for x in t.versions], dtype=np.int32),
        "truncated": np.array([t.truncated for t in trajectories], dtype=bool),
        "reward": [t.reward for t in trajectories],
        "rewards": [t.rewards for t in trajectories],
    }


def unpack(packed: dict[str, Any], prompts: dict[int, Prompt]) -> list[Trajectory]:
    """Inverse of :func:`pack`; ``prompts`` maps prompt index to Prompt."""
    ends = np.cumsum(packed["length"])
    found = []
    for i, end in enumerate(ends):
        part = slice(int(end - packed["length"][i]), int(end))
        found.append(
            Trajectory(
                prompt=prompts[int(packed["prompt"][i])],
                sample_index=int(packed["sample"][i]),
                token_ids=packed["tokens"][part].tolist(),
                logprobs=packed["logprobs"][part].tolist(),
                versions=packed["versions"][part].tolist(),
                truncated=bool(packed["truncated"][i]),
                reward=packed["reward"][i],
                rewards=packed["rewards"][i],
            )
        )
    return found


def all_gather_trajectories(local: Sequence[Trajectory] | None, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Every replica's trajectories on every rank, ordered by (position of the prompt, sample).

    Args:
        local: this replica's trajectories on its first rank, None on its other ranks (they hold the same).
        prompts: the step's prompts in global order.
    """
    parts: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, None if local is None else pack(local))
    by_index = {prompt.index: prompt for prompt in prompts}
    position = {prompt.index: i for i, prompt in enumerate(prompts)}
    found = [t for part in parts if part is not None for t in unpack(part, by_index)]
    return sorted(found, key=lambda t: (position[t.prompt.index], t.sample_index))


def all_gather_lists(local: dict[int, list[float]], total: int) -> list[list[float]]:
    """Lists of numbers keyed by global sample index -> all of them, in order, on every rank.

    Raises:
        RuntimeError: a sample is missing.
    """
    keys = sorted(local)
    packed = (keys, [len(local[k]) for k in keys], np.array([x for k in keys for x in local[k]], dtype=np.float32))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, packed)
    found: dict[int, list[float]] = {}
    for part_keys, lengths, values in parts:
        ends = np.cumsum(lengths, dtype=np.int64)
        for k, length, end in zip(part_keys, lengths, ends, strict=True):
            found[k] = values[end - length : end].tolist()
    missing = [i for i in range(total) if i not in found]
    if missing:
        raise RuntimeError(f"log-probabilities of {len(missing)} of {total} samples are missing, first: {missing[0]}")
    return [found[i] for i in range(total)]
