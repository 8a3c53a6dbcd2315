"""SamplePool: admission, ages, batches, and that nothing is lost or counted twice."""

from __future__ import annotations

import io
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.engines.rollout.streaming import tokens_left
from hybridengine.schedule.claims import Claims
from hybridengine.schedule.pool import SamplePool, in_order
from hybridengine.types import Prompt, SamplingParams, Trajectory


def prompts(start: int, count: int) -> list[Prompt]:
    return [Prompt(index=i, token_ids=[i], text=f"p{i}") for i in range(start, start + count)]


def sample(prompt: Prompt, k: int, tokens: int = 3, versions: list[int] | None = None) -> Trajectory:
    return Trajectory(
        prompt=prompt, sample_index=k, token_ids=[7] * tokens, logprobs=[-1.0] * tokens,
        versions=versions or [0] * tokens, truncated=False, reward=1.0, rewards={"r": 1.0},
    )  # fmt: skip


def complete(pool: SamplePool, indices: list[int]) -> None:
    for group in [g for g in pool.open if g.index in indices]:
        for k in range(pool.group_size):
            pool.update(sample(group.prompt, k), finished=True)


def test_capacity_counts_what_was_consumed_also_after_a_resume() -> None:
    """Staleness 1, batches of 4, 50 steps done: 8 groups, in the run and in the resumed one."""
    pool = SamplePool(batch=4, group_size=1, staleness=1)
    next_prompt = 0
    for _ in range(50):
        admitted = pool.admit(prompts(next_prompt, pool.capacity()))
        next_prompt += len(admitted)
        complete(pool, [g.index for g in pool.open])
        assert pool.take() is not None
        assert pool.capacity() == 0, "one batch ahead of the one that is trained, and no more"
        pool.mark_trained()
    assert (pool.step, pool.ready, pool.capacity()) == (50, 4, 4)
    assert pool.take() is not None
    pool.mark_trained()
    assert pool.capacity() == 8
    resumed = SamplePool(batch=4, group_size=1, staleness=1)
    resumed.load_state_dict(pool.state_dict())
    assert (resumed.step, resumed.capacity()) == (51, 8)


def test_sync_admits_one_batch_and_partial_more() -> None:
    sync = SamplePool(batch=4, group_size=2)
    assert sync.capacity() == 4
    sync.admit(prompts(0, 3))
    assert sync.capacity() == 1
    partial = SamplePool(batch=4, group_size=2, staleness=None, over_provision=1.6)
    assert partial.capacity() == 7
    partial.admit(prompts(0, 7))
    complete(partial, [1, 2, 4, 5, 6])
    batch, metrics = partial.take() or ([], {})
    assert [t.prompt.index for t in batch] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert metrics["rollout/ready_groups"] == 1 and metrics["rollout/open_groups"] == 2
    assert partial.capacity() == 4  # 7 less the one that is ready and the two that go on


def test_recycled_groups_come_first_then_the_longest_expected() -> None:
    pool = SamplePool(batch=4, group_size=1, staleness=None)
    pool.admit(prompts(0, 5))
    pool.update(sample(prompts(3, 1)[0], 0, tokens=2), finished=False)
    assert [g.index for g in pool.open] == [3, 0, 1, 2, 4]
    assert [g.index for g in in_order(pool.open, {"p0": 5.0, "p2": 50.0})] == [3, 2, 1, 4, 0]
    started = pool.open[0]
    assert started.is_started and len(started.unfinished()[0].token_ids) == 2


def test_budget_of_a_resumed_sample_is_what_is_left() -> None:
    prompt = Prompt(index=0, token_ids=[1, 2])
    assert tokens_left(sample(prompt, 0, tokens=5), SamplingParams(max_tokens=8), 100) == 3
    assert tokens_left(sample(prompt, 0, tokens=5), SamplingParams(max_tokens=8), 9) == 2
    with pytest.raises(ValueError, match="8 of 8 response tokens"):
        tokens_left(sample(prompt, 0, tokens=8), SamplingParams(max_tokens=8), 100)


def test_overtaken_groups_are_dropped_by_age_and_counted() -> None:
    pool = SamplePool(batch=1, group_size=1, staleness=1)
    pool.admit(prompts(0, 2))
    for new in (2, 3):
        complete(pool, [new - 1])
        assert pool.take() is not None
        pool.mark_trained()
        pool.admit(prompts(new, pool.capacity()))
    assert pool.step == 2 and [g.index for g in pool.open] == [0, 3]
    complete(pool, [0])
    assert pool.take() is None and pool.dropped == 1
    assert pool.capacity() == 1  # its place is free again


@pytest.mark.parametrize("finished", [True, False])
def test_samples_that_are_not_open_are_refused(finished: bool) -> None:
    pool = SamplePool(batch=1, group_size=1)
    pool.admit(prompts(0, 1))
    complete(pool, [0])
    with pytest.raises(ValueError, match="prompt 0, sample 0 is not open"):
        pool.update(sample(prompts(0, 1)[0], 0), finished=finished)
    with pytest.raises(ValueError, match="prompt 0 is in the pool already"):
        pool.admit(prompts(0, 1))


@settings(max_examples=150, deadline=None)
@given(
    staleness=st.sampled_from([0, 1, 4, None]), batch=st.integers(1, 5), size=st.integers(1, 3),
    over=st.floats(1.0, 3.0), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_random_lives(staleness: int | None, batch: int, size: int, over: float, seed: int) -> None:
    """Ages within the bound, whole groups, nobody twice, everybody accounted for; a saved pool goes on alike."""
    rng, over = random.Random(seed), over if staleness is None else 1.0
    pool = SamplePool(
        batch=batch, group_size=size, staleness=staleness, over_provision=over if staleness is None else 1
    )
    admitted, trained, version = 0, [], 0
    admitted_at: dict[int, int] = {}
    for _ in range(60):
        for group in pool.admit(prompts(admitted, pool.capacity())):
            admitted_at[group.index] = pool.step
            admitted += 1
        for group in rng.sample(pool.open, k=rng.randint(0, len(pool.open))):
            for unfinished in group.unfinished()[: rng.randint(0, size)]:
                grown = sample(group.prompt, unfinished.sample_index, versions=[*unfinished.versions, version])
                pool.update(grown, finished=rng.random() < 0.5)
        if rng.random() < 0.2 and pool.step == pool.taken:
            stream = io.BytesIO()
            torch.save(pool.state_dict(), stream)
            stream.seek(0)
            saved = torch.load(stream, weights_only=True)
            pool = SamplePool(batch=batch, group_size=size, staleness=staleness, over_provision=pool.over_provision)
            pool.load_state_dict(saved)
            assert pool.state_dict() == saved
        if pool.step < pool.taken:  # no batch is taken while another is trained, but groups are admitted and grow
            pool.mark_trained()
            version += 1
            continue
        taken = pool.take()
        if taken is not None:
            found = [t.prompt.index for t in taken[0]]
            assert found == sorted(found) and all(found.count(i) == size for i in found) and len(found) == batch * size
            ages = [pool.step - admitted_at[i] for i in found]
            assert taken[1]["staleness/max"] == max(ages)
            assert staleness is None or max(ages) <= staleness
            assert staleness is None or max(version - t.versions[0] for t in taken[0]) <= staleness
            trained += found[::size]
    assert len(set(trained)) == len(trained)
    assert admitted == len(trained) + pool.ready + len(pool.open) + pool.dropped
    if staleness is not None:
        assert pool.ready + len(pool.open) <= (staleness + 1) * batch


def test_in_order_of_start_short_groups_do_not_overtake() -> None:
    """Batches of 2, staleness 1, groups 0 to 3 admitted: 1 and 3 are complete first, and wait for 0 and 2."""
    overtaking, waiting = (SamplePool(batch=2, group_size=1, staleness=1, in_order=fair) for fair in (False, True))
    for pool in (overtaking, waiting):
        pool.admit(prompts(0, pool.capacity()))
        complete(pool, [1, 3])
    batch = overtaking.take()
    assert batch is not None and [t.prompt.index for t in batch[0]] == [1, 3]
    assert waiting.take() is None
    complete(waiting, [2])
    assert waiting.take() is None
    complete(waiting, [0])
    batch = waiting.take()
    assert batch is not None and [t.prompt.index for t in batch[0]] == [0, 1]
    assert batch[1]["rollout/ready_groups"] == 2.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 10_000))
def test_in_order_of_start_nothing_is_dropped_and_nothing_overtaken(staleness: int, batch: int, seed: int) -> None:
    """However groups are completed: trained in the order of admission, never older than the bound."""
    rng = random.Random(seed)
    pool = SamplePool(batch=batch, group_size=1, staleness=staleness, in_order=True)
    admitted, trained = 0, list[int]()
    for _ in range(80):
        admitted += len(pool.admit(prompts(admitted, pool.capacity())))
        complete(pool, rng.sample([g.index for g in pool.open], k=rng.randint(0, len(pool.open))))
        taken = pool.take()
        if taken is not None:
            trained += [t.prompt.index for t in taken[0]]
            assert taken[1]["staleness/max"] <= staleness
            pool.mark_trained()
    assert trained == list(range(len(trained))) and pool.dropped == 0 and len(trained) > 0


def test_one_replica_claims_everything_in_order() -> None:
    claims = Claims(5, replica=0, replicas=1, slots=2)
    assert [claims.next() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert claims.add_completed(2) == 2 and claims.add_completed(1) == 3
