"""Dynamic sampling: batches of groups with a signal under every schedule, and nothing else about them changed."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.config import Config, DataConfig, RolloutConfig, ScheduleConfig
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.world import World
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import Residency
from hybridengine.schedule.base import RolloutLostError
from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.schedule.pool import Group, NoSignalError, Replacement, SamplePool, is_flat, make_pool
from hybridengine.simulate.costs import Costs
from hybridengine.simulate.lengths import Fixed
from hybridengine.simulate.scenario import SCHEDULES, Scenario
from hybridengine.simulate.schedules import Disaggregated, simulate
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, Trajectory
from tests.unit.schedule.fakes import Scorer, Sharding


def prompts(start: int, count: int) -> list[Prompt]:
    return [Prompt(index=i, token_ids=[i], text=f"p{i}") for i in range(start, start + count)]


def sample(prompt: Prompt, k: int, reward: float, logprob: float = -1.0) -> Trajectory:
    return Trajectory(
        prompt=prompt, sample_index=k, token_ids=[7], logprobs=[logprob], versions=[0], truncated=False, reward=reward,
    )  # fmt: skip


def finish(pool: SamplePool, group: Group, *, flat: bool) -> None:
    for k in range(pool.group_size):
        pool.update(sample(group.prompt, k, 1.0 if flat or k == 0 else 0.0), finished=True)


def make(batch: int = 4, *, max_groups: int = 100, fails: bool = False, **values: Any) -> SamplePool:
    return SamplePool(batch=batch, group_size=2, replacement=Replacement(max_groups, fails), **values)


def test_flat_groups_leave_and_make_room() -> None:
    """4 prompts, of which 1 and 3 tell nothing: two more are admitted, and then the batch is full."""
    pool = make()
    for group in pool.admit(prompts(0, pool.capacity())):
        finish(pool, group, flat=group.index % 2 == 1)
    assert pool.take() is None
    assert (pool.ready, pool.capacity(), pool.replaced) == (2, 2, 2)
    for group in pool.admit(prompts(4, pool.capacity())):
        finish(pool, group, flat=False)
    batch, metrics = pool.take() or ([], {})
    assert [t.prompt.index for t in batch[::2]] == [0, 2, 4, 5]
    assert metrics["dynamic_sampling/replaced_groups"] == 2 and metrics["dynamic_sampling/flat_groups"] == 0


def test_without_it_flat_groups_are_trained_like_others() -> None:
    pool = SamplePool(batch=2, group_size=2)
    for group in pool.admit(prompts(0, 2)):
        finish(pool, group, flat=True)
    batch, metrics = pool.take() or ([], {})
    assert len(batch) == 4 and not any(name.startswith("dynamic_sampling") for name in metrics)


@pytest.mark.parametrize(
    ("rewards", "logprobs", "flat"),
    [
        ([1.0, 1.0], [-1.0, -1.0], True),
        ([0.1 + 0.2, 0.3], [-1.0, -1.0], True),
        ([1.0, 0.0], [-1.0, -1.0], False),
        ([1.0, 1.0, 0.0], [-1.0, -1.0, math.nan], True),
    ],
    ids=["equal", "equal-up-to-rounding", "different", "different-but-unsound"],
)
def test_what_a_flat_group_is(rewards: list[float], logprobs: list[float], flat: bool) -> None:
    (prompt,) = prompts(0, 1)
    samples = [sample(prompt, k, r, p) for k, (r, p) in enumerate(zip(rewards, logprobs, strict=True))]
    assert is_flat(Group(prompt, 0, samples)) is flat


def test_exhausted_and_filled() -> None:
    """Two may be replaced: of five flat groups the other three are trained, and the next batch starts counting anew."""
    pool = make(3, max_groups=2)
    for start in (0, 3):
        for group in pool.admit(prompts(start, pool.capacity())):
            finish(pool, group, flat=True)
    _, metrics = pool.take() or ([], {})
    assert (metrics["dynamic_sampling/replaced_groups"], metrics["dynamic_sampling/flat_groups"]) == (2, 3)
    pool.mark_trained()
    for group in pool.admit(prompts(6, pool.capacity())):
        finish(pool, group, flat=group.index == 6)
    assert pool.replaced == 3 and pool.capacity() == 1


def test_exhausted_and_refused() -> None:
    """The run ends as it does when nobody can generate: saved, and resumed with as many tries again."""
    pool = make(3, max_groups=2, fails=True)
    for group in pool.admit(prompts(0, 3)):
        finish(pool, group, flat=True)
    with pytest.raises(NoSignalError, match="3 groups with equal rewards for one batch of 3: .*max_rounds") as caught:
        pool.take()
    assert isinstance(caught.value, RolloutLostError)
    resumed = make(3, max_groups=2, fails=True)
    resumed.load_state_dict(pool.state_dict())
    assert resumed.take() is None


def test_rounds_count_in_batches() -> None:
    config = Config(data=DataConfig(prompts_per_step=8))
    assert make_pool(config).replacement is None
    config.algorithm.dynamic_sampling.enable = True
    config.algorithm.dynamic_sampling.max_rounds = 3
    replacement = make_pool(config).replacement
    assert replacement is not None and (replacement.max_groups, replacement.fails) == (16, False)


@settings(max_examples=30, deadline=None)
@given(staleness=st.sampled_from([0, 1, 4, None]), batch=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_random_lives(staleness: int | None, batch: int, seed: int) -> None:
    """Exactly a batch of groups with a signal, each once, all accounted for; a pool saved halfway goes on alike."""
    rng = random.Random(seed)
    values: dict[str, Any] = {"staleness": staleness, "over_provision": 1.5 if staleness is None else 1.0}
    pool, twin = make(batch, **values), make(batch, **values)
    admitted, trained = 0, []
    for _ in range(80):
        count = pool.capacity()
        assert count == twin.capacity()
        for each in (pool, twin):
            each.admit(prompts(admitted, count))
        admitted += count
        for group in rng.sample(pool.open, k=rng.randint(0, len(pool.open))):
            flat = rng.random() < 0.5
            for each in (pool, twin):
                finish(each, next(g for g in each.open if g.index == group.index), flat=flat)
        if rng.random() < 0.2 and pool.step == pool.taken:
            stream = io.BytesIO()
            torch.save(twin.state_dict(), stream)
            stream.seek(0)
            twin = make(batch, **values)
            twin.load_state_dict(torch.load(stream, weights_only=True))
        if pool.step < pool.taken:
            pool.mark_trained()
            twin.mark_trained()
            continue
        taken, again = pool.take(), twin.take()
        assert (taken is None) == (again is None)
        if taken is not None and again is not None:
            assert [t.prompt.index for t in taken[0]] == [t.prompt.index for t in again[0]] and taken[1] == again[1]
            assert len(taken[0]) == 2 * batch and all(t.reward == float(t.sample_index == 0) for t in taken[0])
            trained += [t.prompt.index for t in taken[0][::2]]
    assert len(set(trained)) == len(trained)
    assert admitted == len(trained) + pool.ready + len(pool.open) + pool.dropped + pool.replaced


# -- the schedules -----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class EvenPromptsAreFlat(Scorer):
    """Of every second prompt all samples are right."""

    def submit(self, sample: Trajectory) -> None:
        super().submit(sample)
        if sample.prompt.index % 2 == 0:
            sample.reward = 1.0


@pytest.mark.parametrize("schedule", ["sync", "partial"])
def test_colocated_rounds_share_one_sync(tmp_path: Path, one_rank: None, schedule: str) -> None:
    """A step generates until its batch is full of groups with a signal, in several rounds at one version."""
    config = Config(
        output_dir=str(tmp_path), data=DataConfig(prompts_per_step=4), rollout=RolloutConfig(samples_per_prompt=2),
        schedule=ScheduleConfig(name=schedule, over_provision=1.5),
    )  # fmt: skip
    config.algorithm.dynamic_sampling.enable = True
    log: list[str] = []
    train = SimpleNamespace(version=0)
    sharding: Any = Sharding(train, log, lambda prompt, sample: 1 + prompt % 3)
    source = ColocatedRollouts(
        config, World(), sharding=sharding, scorer=EvenPromptsAreFlat(log),  # type: ignore[arg-type]
        loader=PromptLoader(prompts(0, 100), prompts_per_step=4, shuffle=False, seed=1),
        phases=Phases.over(Residency({}), PhaseTimer(), torch.device("cpu")),
    )  # fmt: skip
    rounds, trained = 0, list[int]()
    for train.version in range(3):
        source.start_step()
        found = None
        while found is None:
            for attempt in source.attempts():
                with attempt:
                    source.enter_rollout_mode()
                    source.generate()
            found = source.rewards()
            rounds += 1
        batch, metrics = found
        trained += [t.prompt.index for t in batch[::2]]
        assert len(batch) == 8 and metrics["dynamic_sampling/flat_groups"] == 0
        if schedule == "sync":
            assert {v for t in batch for v in t.versions} == {train.version}
    assert len(set(trained)) == 12 and all(index % 2 for index in trained), "each once, none without a signal"
    assert rounds > 3
    versions = [int(entry.split()[-1]) for entry in log if entry.startswith("rollout mode")]
    assert len(versions) == rounds and versions == sorted(versions) and set(versions) == {0, 1, 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rollout_ranks", [0, 2])
def test_the_simulator_knows_the_pass_rate(schedule: str, rollout_ranks: int) -> None:
    """At a pass rate of a half every arm fills its batches with groups that passed, from twice the samples."""
    if not rollout_ranks and schedule in ("one_step_off", "async"):
        return
    base = Scenario(
        schedule=schedule, ranks=4, rollout_ranks=rollout_ranks, prompts=16, samples=2, slots=16, lengths=Fixed(10),
        steps=30, warmup=5, staleness=2,
    )  # fmt: skip
    costs = Costs(decode=((1, 1.0),), step=10.0, sync=2.0)
    plain, dynamic = simulate(base, costs), simulate(base.with_(pass_rate=0.5), costs)
    assert dynamic.metric("dynamic_sampling/flat_groups") == 0
    assert dynamic.metric("dynamic_sampling/replaced_groups") == pytest.approx(16, rel=0.25)
    assert dynamic.generated / plain.generated == pytest.approx(2, rel=0.25)
    assert dynamic.step_seconds >= plain.step_seconds
    assert plain.pool.replacement is None


def test_one_step_off_replaces_before_the_weights_change() -> None:
    """A batch is of one version, replacements included."""
    scenario = Scenario(
        schedule="one_step_off", ranks=2, rollout_ranks=1, prompts=8, samples=2, slots=8, lengths=Fixed(10), steps=12,
        warmup=2, pass_rate=0.4,
    )  # fmt: skip
    arm = Disaggregated(scenario, Costs(decode=((1, 1.0),), step=10.0, sync=2.0))
    take, batches = arm.pool.take, []

    def recorded() -> Any:
        found = take()
        if found is not None:
            batches.append({t.versions[0] for t in found[0]} | {t.versions[-1] for t in found[0]})
        return found

    arm.pool.take = recorded  # type: ignore[method-assign]
    arm.run()
    assert len(batches) == 12 and all(len(versions) == 1 for versions in batches)


@pytest.mark.parametrize("pass_rate", [0.0, 1.5, math.nan])
def test_pass_rates_that_can_t_be(pass_rate: float) -> None:
    with pytest.raises(ValueError, match="pass_rate=.*: must be above 0, up to 1"):
        Scenario(ranks=1, lengths=Fixed(1), pass_rate=pass_rate)
