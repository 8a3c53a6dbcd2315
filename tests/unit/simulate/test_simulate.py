"""The simulator: hand-computed arms, conservation laws, closed forms.

Unless said otherwise an engine step takes 1 s whatever runs, a training step 10 s, a sync 2 s, and nothing else costs.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.simulate.costs import Costs
from hybridengine.simulate.lengths import Fixed, Lognormal, Measured, Scaled, parse
from hybridengine.simulate.scenario import SCHEDULES, Outcome, Scenario
from hybridengine.simulate.schedules import Arm, Colocated, Disaggregated, simulate

COSTS = Costs(decode=((1, 1.0),), step=10.0, sync=2.0)


def lengths(*tokens: int, samples: int = 1) -> Measured:
    """Per prompt, from the first; they repeat."""
    return Measured({prompt: dict.fromkeys(range(samples), length) for prompt, length in enumerate(tokens)})


def arm(tokens: Measured | Fixed, **values: Any) -> Scenario:
    base: dict[str, Any] = {"prompts": 1, "samples": 1, "slots": 8, "steps": 3, "warmup": 0, "lengths": tokens}
    return Scenario(**(base | values))


def seconds(outcome: Outcome) -> list[float]:
    return [step.seconds for step in outcome.steps]


# -- hand-computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "rollout"), [(2, 5.0), (1, 8.0)])
@pytest.mark.parametrize("rollout_ranks", [0, 1], ids=["colocated", "disaggregated"])
def test_sync(slots: int, rollout: float, rollout_ranks: int) -> None:
    """Answers of 3 and 5 tokens: together 5 s, one after the other 8 s; then 10 s training, before it 2 s sync."""
    ranks = 1 + rollout_ranks
    outcome = simulate(arm(lengths(3, 5), prompts=2, slots=slots, ranks=ranks, rollout_ranks=rollout_ranks), COSTS)
    assert seconds(outcome) == [2 + rollout + 10] * 3
    step = outcome.step_seconds
    assert outcome.sync_fraction == pytest.approx(2 / step)
    assert outcome.train_idle == pytest.approx(rollout / step if rollout_ranks else 0.0)
    assert outcome.rollout_idle == pytest.approx(10 / step if rollout_ranks else 0.0)
    assert outcome.slots_used == pytest.approx(8 / (rollout * slots))


def test_partial_colocated() -> None:
    """Batches of 1, 2 in flight, answers of 5, 2, 3, 4 tokens.

    1. 0 and 1 run; 1 ends after 2 s, 0 keeps 2 tokens.
    2. 0 goes on, 2 is admitted: both end after 3 s; 0 is taken, being the first.
    3. 2 is ready, 3 is admitted and gets one engine step.
    """
    scenario = arm(lengths(5, 2, 3, 4), schedule="partial", over_provision=2.0)
    outcome = simulate(scenario, COSTS)
    assert seconds(outcome) == [2 + 2 + 10, 2 + 3 + 10, 2 + 1 + 10]
    assert [step.response_tokens for step in outcome.steps] == [2, 5, 3]
    assert [step.metrics["rollout/recycled_samples"] for step in outcome.steps] == [0, 1, 0]
    assert [step.metrics["lag/max"] for step in outcome.steps] == [0, 1, 1]
    (group,) = outcome.pool.open
    assert (group.index, len(group.samples[0].token_ids)) == (3, 1)


def test_partial_disaggregated() -> None:
    """As above, but a batch that is ready is taken without any engine step; then 3 is called back without a token."""
    scenario = arm(lengths(5, 2, 3, 4), schedule="partial", over_provision=2.0, ranks=2, rollout_ranks=1)
    outcome = simulate(scenario, COSTS)
    assert seconds(outcome) == [2 + 2 + 10, 2 + 3 + 10, 2 + 0 + 10]
    assert [len(group.samples[0].token_ids) for group in outcome.pool.open] == [0]


@pytest.mark.parametrize(("tokens", "steady", "waited"), [(4, 12.0, 0.0), (20, 22.0, 10.0)])
def test_one_step_off(tokens: int, steady: float, waited: float) -> None:
    """First step: 2 + tokens + 10. Then generation starts with training and both end before the next sync."""
    scenario = arm(Fixed(tokens), schedule="one_step_off", ranks=2, rollout_ranks=1)
    outcome = simulate(scenario, COSTS)
    assert seconds(outcome) == [2 + tokens + 10, steady, steady]
    assert outcome.steps[1].waited == waited
    assert [step.metrics["lag/max"] for step in outcome.steps] == [0, 1, 1]


def test_async_goes_on_across_the_sync() -> None:
    """One slot, staleness 1, training 1 s, sync 1 s, answers of 4 tokens.

    Sample 0 runs from 1 to 5 and sample 1 from 5; training ends at 6, the sync at 7, by when sample 1 has one token.
    Its other three take until 10. From then on a step is four tokens and a sync, as training is hidden.
    """
    costs = Costs(decode=((1, 1.0),), step=1.0, sync=1.0)
    scenario = arm(Fixed(4), schedule="async", staleness=1, slots=1, ranks=2, rollout_ranks=1, steps=4)
    outcome = simulate(scenario, costs)
    assert [step.end for step in outcome.steps] == [6, 11, 16, 21]
    assert [step.metrics["rollout/recycled_samples"] for step in outcome.steps] == [0, 1, 1, 1]
    assert [step.metrics["lag/max"] for step in outcome.steps] == [0, 1, 1, 1]
    assert outcome.rollout_idle == pytest.approx(0)


def test_async_waits_for_the_trainer_at_its_bound() -> None:
    """Training takes 10 s, an answer 4 s: one group beside the one that is trained, and the replica idles."""
    scenario = arm(Fixed(4), schedule="async", staleness=1, slots=1, ranks=2, rollout_ranks=1, steps=6, warmup=2)
    outcome = simulate(scenario, COSTS)
    assert seconds(outcome)[2:] == [12.0] * 4
    assert outcome.rollout_idle == pytest.approx(6 / 12)
    assert outcome.train_idle == 0


def test_groups_that_others_have_overtaken_are_dropped_for_their_age() -> None:
    """A group of 100 tokens among groups of 1: it would be trained long after staleness 1."""
    tokens = Measured({0: {0: 100}} | {prompt: {0: 1} for prompt in range(1, 50)})
    scenario = arm(tokens, schedule="async", staleness=1, ranks=2, rollout_ranks=1, steps=20)
    outcome = simulate(scenario, COSTS)
    assert outcome.pool.dropped == 1
    assert max(step.metrics["staleness/max"] for step in outcome.steps) <= 1


def test_in_order_of_start_the_long_answer_is_waited_for() -> None:
    """Batches of 1, staleness 1, answers of 30, 2, 2, ... tokens: overtaken by 1, the long one is trained second; in
    order it is trained first, after 30 s."""
    tokens = lengths(30, *[2] * 20)
    common: dict[str, Any] = {"schedule": "async", "staleness": 1, "ranks": 2, "rollout_ranks": 1}
    free = simulate(arm(tokens, **common), COSTS)
    waited = simulate(arm(tokens, in_order=True, **common), COSTS)
    assert free.steps[0].response_tokens == 2
    assert [step.response_tokens for step in waited.steps] == [30, 2, 2] and waited.pool.dropped == 0
    assert waited.steps[0].waited == pytest.approx(30)
    assert waited.scenario.name == "disaggregated-1+1-async_in_order"


def test_in_order_of_start_trains_on_answers_as_long_as_the_policys() -> None:
    """One prompt in ten has an answer of 200 tokens, the others 10: 29 on average, and so under sync. Overtaken, long
    groups are dropped for their age, and the mean is below 20; what was generated for them is lost, too."""
    tokens = lengths(*([200] + [10] * 9) * 5)
    base: dict[str, Any] = {"prompts": 4, "slots": 2, "staleness": 1, "ranks": 2, "rollout_ranks": 1, "steps": 40}
    costs = Costs(decode=((1, 1.0),), step=10.0, sync=2.0)
    sync, overtaking, in_order = (
        simulate(arm(tokens, **base, **schedule), costs)
        for schedule in ({"schedule": "sync"}, {"schedule": "async"}, {"schedule": "async", "in_order": True})
    )
    assert sync.response_length == pytest.approx(29, rel=0.02)
    assert in_order.response_length == pytest.approx(sync.response_length, rel=0.02) and in_order.pool.dropped == 0
    assert overtaking.response_length < 20 and overtaking.pool.dropped > 0
    assert in_order.tokens_per_second > max(sync.tokens_per_second, overtaking.tokens_per_second)


@pytest.mark.parametrize(("stealing", "rollout"), [(True, 6.0), (False, 8.0)])
def test_work_stealing(stealing: bool, rollout: float) -> None:
    """Two replicas of one slot, answers of 1, 4, 1, 4 tokens. Dealt: 1 + 1 and 4 + 4. Stolen: 1 + 1 + 4 and 4."""
    scenario = arm(lengths(1, 4, 1, 4), prompts=4, slots=1, ranks=2, stealing=stealing)
    outcome = simulate(scenario, COSTS)
    assert outcome.steps[0].seconds == 2 + rollout + 10
    assert outcome.rollout_idle == pytest.approx((rollout - 5) / (rollout + 12))


@pytest.mark.parametrize("split", [{}, {"ranks": 2, "rollout_ranks": 1}])
def test_samples_take_slots_one_by_one(split: dict[str, int]) -> None:
    """Three slots, groups of two samples: the second group's long one starts at once, its short one at 2 s."""
    tokens = Measured({0: {0: 2, 1: 3}, 1: {0: 5, 1: 1}})
    scenario = arm(tokens, prompts=2, samples=2, slots=3, **split)
    assert simulate(scenario, COSTS).steps[0].seconds == 2 + 5 + 10


def test_prices() -> None:
    """Two samples of 10 prompt tokens and 2 response tokens, each cost alone in a power of ten.

    Prefill 20 tokens; context 20 in the first engine step, 22 in the second; 24 tokens trained over 2 ranks.
    """
    costs = Costs(decode=((1, 1e-3), (3, 3e-3)), prefill=1.0, context=1e2, train=1e5, step=1e8, sync=1e9, rollout=1e10)
    outcome = simulate(arm(Fixed(2), prompts=2, prompt_tokens=10, ranks=2, tp=2, steps=1), costs)
    assert outcome.steps[0].seconds == pytest.approx(2 * 2e-3 + 20 + 42e2 + 12e5 + 1e8 + 1e9 + 1e10, rel=1e-15)


def test_latency_delays_the_trainer_and_not_the_replica() -> None:
    costs = Costs(decode=((1, 1.0),), step=10.0, sync=2.0, latency=0.5)
    assert seconds(simulate(arm(Fixed(4), ranks=2, rollout_ranks=1), costs)) == [16.5] * 3
    hidden = arm(Fixed(4), schedule="one_step_off", ranks=2, rollout_ranks=1)
    assert seconds(simulate(hidden, costs)) == [16.5, 12, 12]


# -- laws ----------------------------------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    schedule = draw(st.sampled_from(SCHEDULES))
    replicas = draw(st.integers(1, 3))
    placed = draw(st.booleans()) or schedule in ("one_step_off", "async")
    samples = draw(st.integers(1, 3))
    return Scenario(
        schedule=schedule, ranks=replicas + (draw(st.integers(1, 2)) if placed else 0),
        rollout_ranks=replicas if placed else 0, prompts=draw(st.integers(1, 5)), samples=samples,
        slots=draw(st.integers(1, 8)), prompt_tokens=draw(st.integers(0, 5)),
        lengths=Lognormal(
            mean=6, p99=40, cap=50, seed=draw(st.integers(0, 99)), within=draw(st.sampled_from([0, 0.5, 1]))
        ),
        staleness=draw(st.integers(0, 3)), over_provision=draw(st.sampled_from([1.0, 1.5, 3.0])),
        stealing=draw(st.booleans()), in_order=draw(st.booleans()) and schedule == "async",
        steps=draw(st.integers(2, 9)), warmup=draw(st.sampled_from([0, 1])),
    )  # fmt: skip


@st.composite
def prices(draw: st.DrawFn) -> Costs:
    some = st.sampled_from([0.0, 0.01, 0.3])
    return Costs(
        decode=((1, draw(st.sampled_from([0.1, 1.0]))), (8, 2.0)), context=draw(some), prefill=draw(some),
        train=draw(some), step=draw(some), rollout=draw(some), sync=draw(some), latency=draw(some),
    )  # fmt: skip


class Recording:
    """Lengths that know whom they were drawn for."""

    def __init__(self, base: Any) -> None:
        self.base, self.drawn = base, dict[tuple[int, int], int]()

    def __call__(self, prompt: int, sample: int) -> int:
        assert (prompt, sample) not in self.drawn, "generated twice"
        self.drawn[prompt, sample] = self.base(prompt, sample)
        return self.drawn[prompt, sample]

    def describe(self) -> str:
        return "recorded"


@settings(max_examples=150, deadline=None)
@given(scenarios(), prices())
def test_nothing_is_lost_or_done_twice(scenario: Scenario, costs: Costs) -> None:
    tokens = Recording(scenario.lengths)
    scenario = scenario.with_(lengths=tokens)
    running: Arm = (Disaggregated if scenario.rollout_ranks else Colocated)(scenario, costs)
    outcome = running.run()
    pool, steps = outcome.pool, outcome.steps
    admitted = next(running._prompts).index
    assert admitted == len(pool.open) + pool.ready + scenario.steps * scenario.prompts + pool.dropped
    for replica in running.replicas:
        replica.stop(replica.clock)
    kept = sum(job.done for job in running._jobs.values())
    finished = sum(length for key, length in tokens.drawn.items() if key not in running._jobs)
    assert sum(replica.tokens for replica in running.replicas) == kept + finished
    assert finished >= sum(step.response_tokens for step in steps)
    assert all(step.tokens - step.response_tokens == scenario.prompts * scenario.samples * scenario.prompt_tokens
               for step in steps)  # fmt: skip
    assert steps[0].start == 0
    assert all(before.end == after.start for before, after in zip(steps, steps[1:], strict=False))
    for step in steps:
        assert step.seconds == pytest.approx(step.waited + step.synced + step.trained)
    assert sum(replica.busy for replica in running.replicas) <= scenario.replicas * max(
        steps[-1].end, *(replica.clock for replica in running.replicas)
    ) * (1 + 1e-9)
    assert 0 <= outcome.rollout_idle <= 1 + 1e-9 and 0 <= outcome.train_idle <= 1 + 1e-9
    if scenario.schedule != "partial":
        limit = {"sync": 0, "one_step_off": 1, "async": scenario.staleness}[scenario.schedule]
        assert outcome.lag_max <= max(step.metrics["staleness/max"] for step in steps) <= limit


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 9), prices(), st.booleans())
def test_sync_is_its_closed_form(tokens: list[int], prompt_tokens: int, costs: Costs, apart: bool) -> None:
    """Slots for all: engine step number l has the samples of l tokens or more, each with prompt + l - 1 of context."""
    count = len(tokens)
    scenario = arm(
        lengths(*tokens), prompts=count, slots=count, prompt_tokens=prompt_tokens, ranks=1 + apart,
        rollout_ranks=int(apart), steps=2,
    )  # fmt: skip
    expected = costs.sync + costs.step + costs.prefill * count * prompt_tokens
    expected += costs.train * (sum(tokens) + count * prompt_tokens) + (costs.latency if apart else costs.rollout)
    for number in range(1, max(tokens) + 1):
        running = sum(length >= number for length in tokens)
        expected += costs.engine_step(running) + costs.context * running * (prompt_tokens + number - 1)
    assert seconds(simulate(scenario, costs)) == pytest.approx([expected] * 2)


@settings(max_examples=60, deadline=None)
@given(scenarios(), prices(), st.sampled_from(["context", "prefill", "train", "step", "rollout", "sync", "latency"]))
def test_synchronous_arms_never_gain_from_a_higher_price(scenario: Scenario, costs: Costs, name: str) -> None:
    """Not true of the others: what is finished when a batch is taken depends on the time it took."""
    import dataclasses

    scenario = scenario.with_(schedule="sync", slots=scenario.prompts * scenario.samples, stealing=False)
    dearer = dataclasses.replace(costs, **{name: getattr(costs, name) + 0.1})
    assert simulate(scenario, dearer).seconds >= simulate(scenario, costs).seconds * (1 - 1e-12)


def test_more_staleness_is_never_slower_here_and_all_bounds_end_at_the_slower_side() -> None:
    """A long-tailed workload, generation dearer than training: in the limit the trainer waits for tokens alone."""
    base = Scenario(
        schedule="async", ranks=3, rollout_ranks=2, prompts=8, samples=4, slots=8, steps=60, warmup=20,
        lengths=Lognormal(mean=30, p99=150, cap=200),
    )  # fmt: skip
    costs = Costs(decode=((1, 1.0), (8, 1.5)), step=5.0, sync=1.0)
    rates = [simulate(base.with_(staleness=eta), costs).tokens_per_second for eta in (0, 1, 2, 4, 8)]
    assert rates == sorted(rates)
    outcome = simulate(base.with_(staleness=8), costs)
    assert outcome.rollout_idle < 0.02
    assert outcome.generated / outcome.seconds == pytest.approx(2 * 8 / 1.5 * (1 - outcome.sync_fraction), rel=0.05)


def test_is_deterministic_and_the_same_prompts_meet_every_arm() -> None:
    scenario = Scenario(lengths=Lognormal(mean=20, p99=100), prompts=4, samples=2, ranks=2, steps=6, warmup=1)
    assert simulate(scenario, COSTS).as_dict() == simulate(scenario, COSTS).as_dict()
    apart = simulate(scenario.with_(rollout_ranks=1), COSTS)
    together = simulate(scenario, COSTS)
    assert [s.response_tokens for s in apart.steps] == [s.response_tokens for s in together.steps]


# -- inputs --------------------------------------------------------------------------------------------------


def test_engine_step_between_and_beyond_the_points() -> None:
    costs = Costs(decode=((2, 1.0), (4, 2.0), (8, 2.0)))
    assert [costs.engine_step(n) for n in (1, 2, 3, 4, 6, 8, 99)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert Costs(decode=((1, 1.0), (2, 3.0))).engine_step(4) == 7.0


@pytest.mark.parametrize("decode", [(), ((2, 1.0), (1, 2.0)), ((1, 0.0),), ((1, 1.0), (1, 2.0))])
def test_engine_steps_that_make_no_sense(decode: Any) -> None:
    with pytest.raises(ValueError, match="increasing order"):
        Costs(decode=decode)


def test_negative_price() -> None:
    with pytest.raises(ValueError, match="sync=-1"):
        Costs(decode=((1, 1.0),), sync=-1)


@pytest.mark.parametrize("within", [0.0, 0.3, 1.0])
def test_lognormal_has_the_mean_and_percentile_it_was_given(within: float) -> None:
    drawn = Lognormal(mean=1000, p99=5000, within=within)
    values = sorted(drawn(prompt, sample) for prompt in range(8000) for sample in range(2))
    assert sum(values) / len(values) == pytest.approx(1000, rel=0.06)
    assert values[int(0.99 * len(values))] == pytest.approx(5000, rel=0.12)
    assert (drawn(5, 0) == drawn(5, 1)) == (within == 0.0)


def test_lognormal_cap() -> None:
    drawn = parse("lognormal:mean=100,p99=900,cap=300")
    assert max(drawn(prompt, 0) for prompt in range(2000)) == 300


def test_lengths_twice_as_long() -> None:
    doubled = Scaled(lengths(3, 5), 2.0)
    assert [doubled(prompt, 0) for prompt in range(3)] == [6, 10, 6]
    assert Scaled(Fixed(1), 0.1)(0, 0) == 1 and doubled.describe().startswith("2 times: ")


def test_measured_lengths_repeat() -> None:
    measured = Measured({3: {0: 5, 2: 7}, 4: {0: 9}})
    assert [measured(3, 0), measured(3, 2), measured(4, 1)] == [5, 7, 9]
    assert measured(3, 1) in (5, 7)  # interrupted in the run: another sample of the prompt stands in
    assert [measured(10, 0), measured(11, 0)] == [5, 9]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed:0", "fixed:N"),
        ("fixed:many", "fixed:N"),
        ("lognormal:mean=5", "p99"),
        ("lognormal:mean=5,p99=4", "more than the mean"),
        ("lognormal:mean=5,p99=500", "at most 15.0 times"),
        ("lognormal:mean=5,p99=9,tail=2", "lognormal:mean"),
        ("pareto:1", "fixed:N"),
    ],
)
def test_lengths_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "async"}, "can't generate while they train"),
        ({"rollout_ranks": 4, "ranks": 4}, "must leave ranks for training"),
        ({"tp": 3, "ranks": 4}, "must divide the 4 ranks"),
        ({"slots": 0}, "slots=0"),
        ({"warmup": 3}, "warmup=3"),
        ({"schedule": "eager"}, "must be one of sync"),
    ],
)
def test_arms_that_do_not_exist(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arm(Fixed(1), **values)
