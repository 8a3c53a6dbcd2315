"""Trajectories of two replicas on every rank: all fields, in global order, whoever had them and in whatever order."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from hybridengine.distributed.exchange import all_gather_lists, all_gather_trajectories
from hybridengine.distributed.world import World
from hybridengine.types import Prompt, Trajectory
from tests.distributed.ranks import RankFailure, run_ranks

PROMPTS = [Prompt(index=index, token_ids=[1, index]) for index in (9, 4, 6)]


def trajectory(prompt: int, sample: int) -> Trajectory:
    size = prompt % 3 + sample
    return Trajectory(
        prompt=PROMPTS[prompt], sample_index=sample, token_ids=list(range(size)),
        logprobs=[-0.5 * n for n in range(size)], versions=[3 + n for n in range(size)],
        truncated=bool(sample), reward=prompt + sample / 4, rewards={"a": 0.25},
    )  # fmt: skip


def _exchange(world: World) -> list[dict[str, object]]:
    mine = [[(2, 1), (0, 0)], [(1, 1), (0, 1), (1, 0), (2, 0)]][world.rank]
    return [asdict(found) for found in all_gather_trajectories([trajectory(*which) for which in mine], PROMPTS)]


def test_everything_arrives_in_order() -> None:
    expected = [asdict(trajectory(prompt, sample)) for prompt in range(3) for sample in range(2)]
    assert run_ranks(2, _exchange) == [expected, expected]


def _lists(world: World, total: int) -> list[list[float]]:
    return all_gather_lists({2: [0.5], 0: []} if world.rank else {1: [1.5, 2.5]}, total)


def test_lists_come_by_index_and_a_missing_one_is_told() -> None:
    assert run_ranks(2, _lists, 3) == [[[], [1.5, 2.5], [0.5]]] * 2
    with pytest.raises(RankFailure, match="1 of 4 samples are missing, first: 3"):
        run_ranks(2, _lists, 4)
