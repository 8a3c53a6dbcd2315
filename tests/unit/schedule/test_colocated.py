"""ColocatedRollouts on made-up samples: how slots are filled, and what is left when a rollout stops early."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.config import Config, DataConfig, RolloutConfig, ScheduleConfig
from hybridengine.distributed.world import World
from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.types import Prompt, Trajectory
from tests.unit.schedule.fakes import Stream


def stream_of(lengths: Sequence[Sequence[int]]) -> Stream:
    """``lengths[group][sample]`` tokens end a sample."""
    return Stream(lambda prompt, sample: lengths[prompt][sample])


def rollouts(stream: Stream, tmp_path: Path, *, slots: int, schedule: str = "sync", batch: int) -> ColocatedRollouts:
    config = Config(
        output_dir=str(tmp_path), data=DataConfig(prompts_per_step=batch),
        rollout=RolloutConfig(samples_per_prompt=2, max_num_seqs=slots),
        schedule=ScheduleConfig(name=schedule, over_provision=1.5),
    )  # fmt: skip
    engine = SimpleNamespace(
        replica=0, num_replicas=1, weights_version=0, stream=lambda params, *, seed, interruptible: stream
    )
    sharding: Any = SimpleNamespace(
        rollout=engine, weight_sync=SimpleNamespace(transfer=SimpleNamespace(method="none"))
    )
    scorer: Any = SimpleNamespace(submit=lambda sample: None, spread=lambda rank, ranks: None)
    return ColocatedRollouts(
        config, World(rank=0, local_rank=0, size=1), sharding=sharding, scorer=scorer, loader=None, phases=None
    )  # type: ignore[arg-type]


def generate(source: ColocatedRollouts, groups: int) -> list[Trajectory]:
    admitted = source.pool.admit(Prompt(index=i, token_ids=[1], text=f"p{i}") for i in range(groups))
    return source._generate(source.sharding.rollout, admitted)


@pytest.mark.parametrize(("slots", "occupied"), [(1, [1] * 11), (3, [3, 3, 3, 1, 1]), (8, [4, 3, 2, 1, 1])])
def test_a_slot_that_becomes_free_is_filled_by_one_sample(tmp_path: Path, slots: int, occupied: list[int]) -> None:
    """Two groups of two samples; the second does not wait for two free slots, and one slot is enough for a group."""
    stream = stream_of([[2, 3], [5, 1]])
    found = generate(rollouts(stream, tmp_path, slots=slots, batch=2), 2)
    assert sorted((s.prompt.index, s.sample_index) for s in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert stream.occupied == occupied


def test_what_had_no_slot_when_a_rollout_stops_stays_as_it_was(tmp_path: Path) -> None:
    """Three slots; with the third step two groups are complete, and only one sample of the third has begun."""
    stream = stream_of([[1, 3], [2, 2], [9, 9]])
    found = generate(rollouts(stream, tmp_path, slots=3, schedule="partial", batch=2), 3)
    assert stream.entered == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [(s.sample_index, len(s.token_ids)) for s in found if s.prompt.index == 2] == [(0, 1)]
