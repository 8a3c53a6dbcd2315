"""The scorer: what it gives, in which order, on which thread, and what errors cost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hybridengine.config import AuditTerm, RewardTerm
from hybridengine.rewards.base import RewardError
from hybridengine.rewards.budget import TimeBudget
from tests.rewards import functions
from tests.rewards.samples import scorer, trajectory

FUNCTIONS = "tests.rewards.functions"
HERE = "tests.rewards.test_scorer"


def test_weighted_sum_keeps_the_parts() -> None:
    terms = {
        "correct": RewardTerm(fn="regex", weight=2.0, kwargs={"pattern": r"\d+"}),
        "form": RewardTerm(fn="format", weight=-0.5, kwargs={"pattern": "it is .*"}),
    }
    scoring = scorer("it is 5", "6", terms=terms)
    batch = [trajectory([1, 0]), trajectory([2, 0])]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.5, 0.0]
    assert batch[0].rewards == {"correct": 1.0, "form": 1.0}
    assert list(batch[0].rewards) == scoring.names == ["correct", "form"]
    scoring.close()


def test_probes_of_the_engine_are_worth_nothing_and_reach_no_function() -> None:
    """Prompts with a negative index are not of the data: the function would fail on them."""
    scoring = scorer("it is 5", "6", terms={"fails": RewardTerm(fn=f"{HERE}:fails")})
    probe = trajectory([1, 0])
    probe.prompt.index = -3
    scoring.submit(probe)
    assert scoring.collect() == [probe] and probe.reward == 0.0
    with pytest.raises(RewardError):
        scoring.score([trajectory([1, 0])])
    scoring.close()


def fails(prompt: str, response: str, answer: Any) -> float:
    raise ValueError("asked")


ran = threading.Event()
threads: list[threading.Thread] = []


def watch(prompt: str, response: str, answer: Any) -> float:
    threads.append(threading.current_thread())
    ran.set()
    return 1.0


class Slow:
    """Decoding takes a moment; the thread that does it is remembered."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.threads.append(threading.current_thread().name)
        time.sleep(0.05)
        return "5"


def test_decoding_and_scoring_happen_elsewhere_while_the_engine_goes_on() -> None:
    from hybridengine.config import RewardConfig
    from hybridengine.rewards.scorer import Scorer

    ran.clear()
    threads.clear()
    tokenizer = Slow()
    scoring = Scorer(RewardConfig(fn=f"{HERE}:watch"), tokenizer)
    batch = [trajectory(index=i) for i in range(4)]
    begin = time.monotonic()
    for one in batch:
        scoring.submit(one)
    assert time.monotonic() - begin < 0.15  # nothing is decoded on the way
    assert ran.wait(10)  # before collect() is called
    assert scoring.collect() == batch and batch[0].reward == 1.0
    assert set(tokenizer.threads) == {"reward-dispatch"}
    assert threading.main_thread() not in threads
    assert scoring.collect() == []
    scoring.close()


def test_results_come_in_the_order_of_submission() -> None:
    scoring = scorer("a", "bb", "ccc", fn=f"{FUNCTIONS}:length")
    batch = [trajectory([1 + i % 3], index=i) for i in range(30)]
    for one in batch:
        scoring.submit(one)
    assert scoring.collect() == batch
    assert [t.reward for t in batch] == [1.0, 2.0, 3.0] * 10
    scoring.close()


def test_poll_hands_out_what_is_done() -> None:
    scoring = scorer("5", fn=f"{FUNCTIONS}:length")
    batch = [trajectory(index=i) for i in range(8)]
    for one in batch:
        scoring.submit(one)
    found: list[Any] = []
    while len(found) < len(batch):
        found += scoring.poll()
    assert sorted(t.prompt.index for t in found) == list(range(8)) and scoring.poll() == []
    scoring.close()


# -- functions that take lists ---------------------------------------------------------------------


def test_lists_get_whole_groups_and_the_rest_together() -> None:
    """Groups of two: prompts 0 and 1 are complete before collect(), one sample of 2 and one of 3 are left."""
    functions.EVENTS.clear()
    scoring = scorer("a", "bb", "ccc", group_size=2, fn=f"{FUNCTIONS}:lists", workers=1)
    batch = [trajectory([1 + i % 3], index=p, sample=s) for i, (p, s) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)])]
    batch += [trajectory([3], index=2), trajectory([1], index=3)]
    for one in batch:
        scoring.submit(one)
    scoring.collect()
    assert [responses for responses, _ in functions.EVENTS] == [["a", "ccc"], ["bb", "a"], ["ccc", "a"]]
    assert [t.reward for t in batch] == [1.0, 2.0, 3.0, 1.0, 3.0, 1.0]
    scoring.close()


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_five_in_five_out_in_order(isolate: bool) -> None:
    scoring = scorer("a", "bb", "ccc", fn=f"{FUNCTIONS}:lists", isolate=isolate)
    batch = [trajectory([i], index=i) for i in (3, 1, 2, 1, 3)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [3.0, 1.0, 2.0, 1.0, 3.0]
    scoring.close()


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_functions_of_trl_and_verl(isolate: bool) -> None:
    terms = {
        "trl": RewardTerm(fn=f"{FUNCTIONS}:trl", isolate=isolate),
        "verl": RewardTerm(fn=f"{FUNCTIONS}:verl", isolate=isolate),
    }
    scoring = scorer("5", "6", "skip", terms=terms)
    row = {"data_source": "gsm8k", "extra_info": {"split": "train"}, "solution": "5"}
    batch = [trajectory([i], index=i, **row) for i in (1, 2, 3)]
    scoring.score(batch)
    assert [t.rewards for t in batch] == [
        {"trl": 1.0, "verl": 1.0, "verl/acc": 1.0},
        {"trl": 0.0, "verl": 0.0, "verl/acc": 0.0},
        {"verl": 0.0, "verl/acc": 0.0},  # None: TRL leaves it out of the sum
    ]
    assert [t.reward for t in batch] == [2.0, 0.0, 0.0]
    scoring.close()


def test_lists_of_the_wrong_length_fail_by_name() -> None:
    scoring = scorer("a", fn=f"{FUNCTIONS}:too_few")
    with pytest.raises(
        RewardError, match="reward too_few on a batch of 2 samples.*returned 1 values, expected a list of 2"
    ):
        scoring.score([trajectory(index=1), trajectory(index=2)])
    scoring.close()


# -- errors ----------------------------------------------------------------------------------------

KINDS = {
    "raise": "KeyError: 'six'", "exit": "SystemExit: 0", "nan": "returned nan", "text": "returned '1'",
    "memory": "MemoryError",
}  # fmt: skip


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_fails_fails_the_step_by_name(kind: str, isolate: bool) -> None:
    """Also sys.exit(0), which would have ended the run as a success. And the scorer still works."""
    if kind == "memory" and isolate:
        pytest.skip("scores 0, see test_service")
    scoring = scorer("fine", kind, fn=f"{FUNCTIONS}:misbehaves", isolate=isolate, workers=2)
    batch = [trajectory([1 + (i == 3)], index=i) for i in range(6)]
    with pytest.raises(RewardError, match=f"reward misbehaves on prompt 3, sample 2: {KINDS[kind]}") as caught:
        scoring.score(batch)
    if kind == "raise":
        assert isinstance(caught.value.__cause__, KeyError) if not isolate else "KeyError" in caught.value.__notes__[0]
    good = [trajectory([1])]
    scoring.score(good)
    assert good[0].reward == 1.0
    scoring.close()


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_on_error_zero_costs_the_sample_and_is_counted(isolate: bool, caplog: pytest.LogCaptureFixture) -> None:
    scoring = scorer("fine", "raise", fn=f"{FUNCTIONS}:misbehaves", isolate=isolate, on_error="zero")
    batch = [trajectory([1 + i % 2], index=i) for i in range(10)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.0, 0.0] * 5
    assert scoring.metrics(scoring.take_stats())["reward/errors/misbehaves"] == 5
    assert len(caplog.records) == 3 and "KeyError: 'six'; scored 0" in caplog.text
    scoring.close()


def test_a_function_that_hangs_here_fails_the_step_by_name() -> None:
    scoring = scorer("fine", "hang", fn=f"{FUNCTIONS}:misbehaves", workers=1, timeout_seconds=0.3)
    begin = time.monotonic()
    with pytest.raises(RewardError, match="reward misbehaves on prompt 1, sample 2: still running after 0.3 s"):
        scoring.score([trajectory([1 + (i == 1)], index=i) for i in range(3)])
    assert time.monotonic() - begin < 20
    good = [trajectory([1])]
    scoring.score(good)
    assert good[0].reward == 1.0
    scoring.close()


def test_a_function_that_hangs_here_costs_one_thread_with_on_error_zero() -> None:
    scoring = scorer("fine", "hang", fn=f"{FUNCTIONS}:misbehaves", workers=1, timeout_seconds=0.3, on_error="zero")
    batch = [trajectory([1 + (i == 1)], index=i) for i in range(6)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert scoring.metrics(scoring.take_stats())["reward/timeouts/misbehaves"] == 1
    scoring.close()


def slow(prompt: str, response: str, answer: Any) -> float:
    time.sleep(0.15)
    return 1.0


def test_the_time_limit_counts_from_the_call_not_from_the_queue() -> None:
    scoring = scorer("5", fn=f"{HERE}:slow", workers=1, timeout_seconds=0.5)
    batch = [trajectory(index=i) for i in range(6)]  # 0.9 s in total
    scoring.score(batch)
    assert all(t.reward == 1.0 for t in batch)
    scoring.close()


def test_the_time_limit_of_several_functions_is_each_ones_own() -> None:
    terms = {name: RewardTerm(fn=f"{HERE}:slow") for name in ("a", "b", "c", "d", "e")}
    scoring = scorer("5", terms=terms, timeout_seconds=0.5)
    batch = [trajectory()]
    scoring.score(batch)
    assert batch[0].reward == 5.0
    scoring.close()


def test_discarded_samples_leave_no_trace() -> None:
    """A repeated rollout submits the same trajectories again; late results of the first attempt are not theirs."""
    scoring = scorer("fine", "hang", fn=f"{FUNCTIONS}:misbehaves", workers=1, timeout_seconds=60.0)
    scoring.submit(trajectory([2]))
    time.sleep(0.1)
    scoring.discard()
    batch = [trajectory([1], index=i) for i in range(3)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.0] * 3
    scoring.close()


# -- async functions -------------------------------------------------------------------------------


def test_async_functions_run_at_the_same_time() -> None:
    """32 calls of 0.2 s, with one thread for everything else."""
    scoring = scorer("5", fn=f"{FUNCTIONS}:judge", workers=1)
    batch = [trajectory([1], index=i) for i in range(32)]
    begin = time.monotonic()
    scoring.score(batch)
    assert time.monotonic() - begin < 5.0 and all(t.reward == 1.0 for t in batch)
    scoring.close()


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_async_functions_have_limits_and_errors(isolate: bool) -> None:
    scoring = scorer(
        "fine", "hang", "raise", fn=f"{FUNCTIONS}:judge", timeout_seconds=0.5, on_error="zero", isolate=isolate
    )
    batch = [trajectory([i], index=i) for i in (1, 2, 3)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.0, 0.0, 0.0]
    taken = scoring.metrics(scoring.take_stats())
    assert (taken["reward/errors/judge"], taken["reward/timeouts/judge"]) == (2, 1)
    scoring.close()
    with pytest.raises(RewardError, match="reward judge .*ConnectionError: no judge"):
        scorer("raise", fn=f"{FUNCTIONS}:judge", isolate=isolate).score([trajectory([1])])


# -- audits, sharing, metrics ----------------------------------------------------------------------


def test_audits_see_a_share_and_weigh_nothing() -> None:
    """Always the same samples: the share is drawn from the sample's address."""
    scoring = scorer("5", "6", fn="exact_match", audit={"second": AuditTerm(fn=f"{FUNCTIONS}:length", share=0.3)})
    batch = [trajectory([1 + i % 2], index=i) for i in range(400)]
    scoring.score(batch)
    audited = [t.prompt.index for t in batch if "audit/second" in t.rewards]
    assert 80 < len(audited) < 160
    assert all(t.reward == t.rewards["exact_match"] for t in batch) and scoring.names == ["exact_match"]
    again = [trajectory([1], index=i) for i in range(400)]
    scoring.score(again)
    assert [t.prompt.index for t in again if "audit/second" in t.rewards] == audited
    scoring.close()


@pytest.mark.parametrize(("fn", "whole_groups"), [("length", False), ("lists", True)])
def test_ranks_of_a_replica_share_the_scoring(fn: str, whole_groups: bool) -> None:
    """Every sample is one rank's; where a function takes lists, a prompt's samples are one rank's."""
    ranks = [scorer("5", fn=f"{FUNCTIONS}:{fn}") for _ in range(4)]
    batch = [trajectory(index=p, sample=s) for p in range(8) for s in range(4)]
    for rank, scoring in enumerate(ranks):
        scoring.spread(rank, 4)
        for one in batch:
            scoring.submit(one)
    shares = [[(t.prompt.index, t.sample_index) for t in scoring.collect()] for scoring in ranks]
    assert sorted(x for share in shares for x in share) == [(t.prompt.index, t.sample_index) for t in batch]
    assert [len(share) for share in shares] == [8] * 4
    for share in shares:
        assert (len({p for p, _ in share}) == 2) == whole_groups
    for scoring in ranks:
        scoring.close()


def test_metrics_say_what_was_hidden_behind_generation() -> None:
    """Four calls of 0.15 s on four threads: two end before collect() is called, two begin with it."""
    scoring = scorer("5", fn=f"{HERE}:slow", workers=4)
    for i in range(2):
        scoring.submit(trajectory(index=i))
    time.sleep(0.4)
    for i in range(2):
        scoring.submit(trajectory(index=i))
    scoring.collect()
    found = scoring.metrics(scoring.take_stats())
    assert found["reward/busy_seconds"] == pytest.approx(0.6, abs=0.3)
    assert found["reward/hidden_fraction"] == pytest.approx(0.5, abs=0.2)
    assert 0 <= found["reward/queue_seconds"] < 0.3
    assert found["reward/errors/slow"] == found["reward/retries"] == 0
    assert scoring.take_stats()[0] == 0.0
    scoring.close()


def test_budget_bounds_what_hanging_calls_cost() -> None:
    """After 6 s of a budget of 6 s, each call gets half a second, or five times what calls take that end."""
    budget = TimeBudget(6.0)
    limits = []
    for _ in range(5):
        limits.append(budget.limit("math", 4.0))
        budget.spend(limits[-1])
    assert limits == [4.0, 2.0, 0.5, 0.5, 0.5]
    budget.ended("code", 0.4)
    assert budget.limit("code", 10.0) == pytest.approx(2.0) and budget.limit("math", 10.0) == 0.5
    budget.renew()
    assert budget.limit("math", 4.0) == 4.0
