"""What every rollout engine must do, checked on a real one: ``run_contract`` runs all checks in one start.

An engine is expensive to start, so each configuration starts once, in processes of its own, runs every check
in order and returns the failures by name; the test files turn them into one test per check.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.distributed.world import World
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.types import Prompt, SamplingParams, Trajectory
from tests.engines.subject import MAX_MODEL_LEN, STOP, TOLERANCE, Subject, prompts, start

# -- the checks, in the order they run -----------------------------------------------------------------


def unservable_before_the_first_sync(s: Subject) -> None:
    assert s.engine.weights_version == -1
    s.check_stale()


def first_update_with_a_parameter_missing_is_refused(s: Subject) -> None:
    missing = next(reversed(s.weights[0]))
    with pytest.raises(RuntimeError, match="1 parameters got no data"):
        s.sync(0, leave_out=missing)
    s.check_stale()


def first_write_with_a_tensor_missing_is_refused(s: Subject) -> None:
    missing = s.layout[-1].tensor
    with pytest.raises(RuntimeError, match=f"got no data.*{missing}"):
        s.write(0, leave_out=missing)
    s.check_stale()


def first_update_is_served(s: Subject) -> None:
    s.sync(0)
    s.check_serves(0)


def part_of_a_fused_parameter_missing_is_refused(s: Subject) -> None:
    missing = next(name for name in s.weights[0] if "k_proj" in name)
    with pytest.raises(RuntimeError, match=f"got no data.*{missing}"):
        s.sync(0, leave_out=missing)
    s.check_stale()
    s.sync(0)


def unknown_parameter_is_refused(s: Subject) -> None:
    s.engine.begin_update()
    for name in ("model.layers.0.self_attn.x_proj.weight", "model.layers.99.mlp.down_proj.weight", "nonsense"):
        with pytest.raises(ValueError, match=name):
            s.engine.load_weight(name, torch.zeros(4, 4))
    s.sync(0)


def weights_outside_of_an_update_are_refused(s: Subject) -> None:
    name, full = next(iter(s.weights[0].items()))
    with pytest.raises(RuntimeError, match="begin_update"):
        s.engine.load_weight(name, full)
    with pytest.raises(RuntimeError, match="begin_update"):
        s.engine.finish_update(s.version + 1)
    s.sync(0)


def logprobs_are_of_the_sampled_distribution(s: Subject) -> None:
    for settings in (
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.1, "top_p": 0.9},
    ):
        found = s.generate(prompts(0, 1, 2, 3), n=4, **settings)
        difference = s.largest_difference(found, 0, SamplingParams(**settings))
        assert difference <= TOLERANCE, (settings, difference)


def greedy_takes_the_likeliest_token(s: Subject) -> None:
    found = s.generate(prompts(0, 1, 2, 3), temperature=0.0, max_tokens=20)
    for trajectory in found:
        assert trajectory.token_ids == s.logits(trajectory, 0).argmax(-1).tolist()
    assert s.largest_difference(found, 0, SamplingParams(temperature=0.0)) <= TOLERANCE


def samples_follow_the_distribution(s: Subject) -> None:
    """Pearson's statistic of 2,000 first tokens; six standard deviations above its mean is never chance."""
    found = s.generate(prompts(1), n=2000, max_tokens=1)
    expected = s.logits(found[0], 0)[0].softmax(-1) * len(found)
    observed = torch.bincount(torch.tensor([t.token_ids[0] for t in found]), minlength=len(expected))
    common = expected > 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum().item()
    freedom = int(common.sum())
    assert freedom > 5 and statistic < freedom + 6 * (2 * freedom) ** 0.5, (statistic, freedom)


def tokens_of_a_sample_are_drawn_independently(s: Subject) -> None:
    """Also of one that is interrupted after every token."""
    check_repeats(s, s.generate(prompts(0, 1, 2, 3), n=32, max_tokens=24))
    samples = [empty_trajectory(p, k) for p in prompts(0, 1, 2, 3) for k in range(16)]
    stream, running = s.engine.stream(SamplingParams(max_tokens=16), seed=7), samples
    while running:
        for sample in running:
            stream.submit(sample, step=3)
        stream.step()
        running = stream.interrupt()
    check_repeats(s, samples)


def check_repeats(s: Subject, samples: list[Trajectory]) -> None:
    """Repeats of the token before, against their expectation; noise used twice would repeat tokens."""
    repeats = expected = variance = 0.0
    for trajectory in samples:
        before, now = trajectory.token_ids[:-1], trajectory.token_ids[1:]
        p = s.logits(trajectory, 0)[1:].softmax(-1)[range(len(before)), before]
        repeats += sum(a == b for a, b in zip(before, now, strict=True))
        expected, variance = expected + p.sum().item(), variance + (p * (1 - p)).sum().item()
    assert abs(repeats - expected) < 6 * variance**0.5, (repeats, expected)


def samples_depend_on_their_seed_only(s: Subject) -> None:
    everything = s.generate(prompts(0, 1, 2, 3, 4), n=4)
    assert [(t.prompt.index, t.sample_index) for t in everything] == [(i, k) for i in range(5) for k in range(4)]
    assert len({tuple(t.token_ids) for t in everything}) > 15
    again = s.generate(prompts(4, 2), n=2)
    for trajectory in again:
        twin = everything[4 * trajectory.prompt.index + trajectory.sample_index]
        assert trajectory.token_ids == twin.token_ids
    first = [t.token_ids for t in s.generate(prompts(0), n=4)]
    assert first != [t.token_ids for t in s.generate(prompts(0), n=4, step=4)]
    assert first != [t.token_ids for t in s.generate(prompts(0), n=4, seed=8)]


def all_end_tokens_stop(s: Subject) -> None:
    found = s.generate(prompts(0, 1, 2, 3, 4, 5), n=32, max_tokens=16)
    for trajectory in found:
        assert not STOP & set(trajectory.token_ids[:-1])
        assert trajectory.truncated == (trajectory.token_ids[-1] not in STOP)
        assert len(trajectory.token_ids) == 16 or not trajectory.truncated
        assert len(trajectory.logprobs) == len(trajectory.versions) == len(trajectory.token_ids)
    assert {t.token_ids[-1] for t in found if not t.truncated} == STOP
    assert any(t.truncated for t in found)


def end_token_at_the_limit_is_not_truncated(s: Subject) -> None:
    found = s.generate(prompts(0, 1, 2), n=64, max_tokens=1)
    assert {t.truncated for t in found} == {True, False}
    assert all(t.truncated == (t.token_ids[0] not in STOP) for t in found)


def context_ends_responses_and_refuses_prompts(s: Subject) -> None:
    almost = Prompt(index=11, token_ids=[7] * (MAX_MODEL_LEN - 3))
    assert max(len(t.token_ids) for t in s.generate([almost], n=8)) == 3
    with pytest.raises(ValueError, match="prompt 12 has 96 tokens"):
        s.generate([*prompts(0), Prompt(index=12, token_ids=[7] * MAX_MODEL_LEN)])
    s.check_serves(0)


def finished_samples_are_announced(s: Subject) -> None:
    seen: list[Trajectory] = []
    params = SamplingParams(n=3, max_tokens=12)
    found = generate(s.engine, prompts(0, 1, 2), params, seed=1, step=1, on_finished=seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, found))


def error_in_the_callback_is_raised_and_survived(s: Subject) -> None:
    def fail(_: Trajectory) -> None:
        raise KeyError("scoring failed")

    with pytest.raises(KeyError, match="scoring failed"):
        generate(s.engine, prompts(0, 1), SamplingParams(n=2, max_tokens=8), seed=1, step=1, on_finished=fail)
    s.check_serves(0)


def sleep_is_refused_while_requests_run(s: Subject) -> None:
    def sleep(_: Trajectory) -> None:
        s.engine.sleep()

    with pytest.raises(RuntimeError, match="requests are running"):
        generate(s.engine, prompts(0, 1), SamplingParams(n=8, max_tokens=12), seed=1, step=1, on_finished=sleep)
    s.check_serves(0)


def stream_answers_as_generate_does(s: Subject) -> None:
    """Also when samples enter late, and when they are interrupted again and again and go on elsewhere in the batch."""
    params = SamplingParams(n=2, max_tokens=12)
    expected = s.generate(prompts(0, 1, 2, 3), n=2)
    for pause in (0, 3):
        samples = [empty_trajectory(p, k) for p in prompts(0, 1, 2, 3) for k in range(2)]
        stream, finished = s.engine.stream(params, seed=7), []
        for sample in samples[:5]:
            stream.submit(sample, step=3)
        assert stream.running == 5
        finished += stream.step()
        for sample in samples[5:]:
            stream.submit(sample, step=3)
        steps = 0
        while stream.running:
            finished += stream.step()
            steps += 1
            if pause and steps % pause == 0:
                for sample in reversed(stream.interrupt()):
                    stream.submit(sample, step=3)
        assert sorted(map(id, finished)) == sorted(map(id, samples))
        if not pause or s.resumes_exactly:
            assert [t.token_ids for t in samples] == [t.token_ids for t in expected]
            assert [t.truncated for t in samples] == [t.truncated for t in expected]
        assert all(len(t.token_ids) == len(t.logprobs) == len(t.versions) for t in samples)
        assert s.largest_difference(samples, 0, params) <= TOLERANCE
    with pytest.raises(ValueError, match="12 of 12 response tokens"):
        s.engine.stream(params, seed=7).submit(next(t for t in samples if t.truncated), step=3)
    s.check_serves(0)


def interrupted_sample_goes_on_under_new_weights(s: Subject) -> None:
    """Each token has the version and the log-probability of the weights that drew it; budgets are what is left."""
    params = SamplingParams(n=4, max_tokens=12)
    samples = [empty_trajectory(p, k) for p in prompts(0, 1) for k in range(4)]
    stream = s.engine.stream(params, seed=7)
    for sample in samples:
        stream.submit(sample, step=3)
    for _ in range(5):
        stream.step()
    with pytest.raises(RuntimeError, match="requests are running"):
        s.engine.sleep()
    stopped, old = stream.interrupt(), s.version
    assert stopped and stream.running == 0
    before = {id(t): len(t.token_ids) for t in stopped}
    assert all(0 < count < 12 for count in before.values())
    s.sync(1)
    stream = s.engine.stream(params, seed=7)
    for sample in stopped:
        stream.submit(sample, step=3)
    while stream.running:
        stream.step()
    for sample in stopped:
        done = before[id(sample)]
        assert sample.versions == [old] * done + [s.version] * (len(sample.token_ids) - done)
        assert len(sample.token_ids) == 12 or not sample.truncated
        for which, part in ((0, slice(0, done)), (1, slice(done, None))):
            chosen = s.logits(sample, which).log_softmax(-1)[range(len(sample.token_ids)), sample.token_ids]
            assert (chosen - torch.tensor(sample.logprobs))[part].abs().max() <= TOLERANCE
    s.sync(0)


def second_update_answers_with_the_new_weights(s: Subject) -> None:
    s.check_serves(0)
    s.sync(1)
    s.check_serves(1)


def weights_written_in_place_answer(s: Subject) -> None:
    s.write(0)
    s.check_serves(0)
    s.write(1)
    s.check_serves(1)


def failed_update_keeps_the_version_and_serves_nothing(s: Subject) -> None:
    s.engine.begin_update()
    name, full = next(iter(s.weights[0].items()))
    s.engine.load_weight(name, full)
    s.check_stale()
    assert s.engine.weights_version == s.version
    s.sync(0)
    s.check_serves(0)


def sleeping_weights_answer_only_after_a_new_sync(s: Subject) -> None:
    for deliver in (s.sync, s.write):
        s.engine.sleep()
        held = [t for t in s.engine.live_tensors().values() if t.untyped_storage().nbytes()]
        assert not any(bool(t.any()) for t in held), "what is left is empty pages"
        s.check_stale()
        with pytest.raises(RuntimeError, match="asleep"):
            s.engine.begin_update()
        s.engine.wake(("weights",))
        s.check_stale()
        with pytest.raises(RuntimeError, match="got no data"):
            s.write(1, leave_out=s.layout[0].tensor)
        deliver(1)
        s.engine.wake(("kv_cache",))
        s.engine.wake()
        s.check_serves(1)


def kv_cache_sleeps_alone(s: Subject) -> None:
    s.check_serves(1)
    s.engine.sleep(("kv_cache",))
    s.engine.sleep(("kv_cache",))
    s.engine.wake(("kv_cache",))
    s.check_serves(1)


def unknown_tags_are_refused(s: Subject) -> None:
    with pytest.raises(ValueError, match="cache_kv"):
        s.engine.sleep(("cache_kv",))
    with pytest.raises(ValueError, match="cache_kv"):
        s.engine.wake(("cache_kv",))


def ranks_of_a_replica_agree(s: Subject) -> None:
    found = [(t.token_ids, t.logprobs) for t in s.generate(prompts(0, 1, 2, 3), n=4)]
    everyone: list[Any] = [None] * s.world.size
    dist.all_gather_object(everyone, found)
    assert all(other == found for other in everyone)
    assert s.engine.num_replicas == s.world.size // s.engine.config.tp


CHECKS: tuple[Callable[[Subject], None], ...] = (
    unservable_before_the_first_sync,
    first_update_with_a_parameter_missing_is_refused,
    first_write_with_a_tensor_missing_is_refused,
    first_update_is_served,
    part_of_a_fused_parameter_missing_is_refused,
    unknown_parameter_is_refused,
    weights_outside_of_an_update_are_refused,
    logprobs_are_of_the_sampled_distribution,
    greedy_takes_the_likeliest_token,
    samples_follow_the_distribution,
    tokens_of_a_sample_are_drawn_independently,
    samples_depend_on_their_seed_only,
    all_end_tokens_stop,
    end_token_at_the_limit_is_not_truncated,
    context_ends_responses_and_refuses_prompts,
    finished_samples_are_announced,
    error_in_the_callback_is_raised_and_survived,
    sleep_is_refused_while_requests_run,
    stream_answers_as_generate_does,
    interrupted_sample_goes_on_under_new_weights,
    second_update_answers_with_the_new_weights,
    weights_written_in_place_answer,
    failed_update_keeps_the_version_and_serves_nothing,
    sleeping_weights_answer_only_after_a_new_sync,
    kv_cache_sleeps_alone,
    unknown_tags_are_refused,
    ranks_of_a_replica_agree,
)
NAMES = [check.__name__ for check in CHECKS]


def run_contract(
    world: World,
    engine: str,
    tp: int,
    paths: list[str],
    options: dict[str, Any],
    own: tuple[Callable[[Subject], None], ...] = (),
) -> dict[str, str]:
    """On every rank: start the engine once, run all checks, return the tracebacks of those that failed.

    Args:
        options: further keys of the ``rollout`` section.
        own: what only this engine promises.
    """
    torch.set_num_threads(1)
    subject = start(world, engine, tp, paths, options)
    failures: dict[str, str] = {}
    for check in (*CHECKS, *own):
        try:
            check(subject)
        except (Exception, pytest.fail.Exception):
            failures[check.__name__] = traceback.format_exc()
    subject.engine.close()
    return failures


def failures_by_check(results: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """(check, every rank's traceback) of all checks that failed anywhere."""
    for name in dict.fromkeys(name for result in results for name in result):
        texts = [f"rank {rank}:\n{result[name]}" for rank, result in enumerate(results) if name in result]
        if texts:
            yield name, "\n".join(texts)
