"""Alarm rules, default rules, and the word about a reward that says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from hybridengine.config import MonitorConfig, ParityConfig
from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World
from hybridengine.monitors import STOPPED, Monitor
from hybridengine.monitors.defaults import DEFAULTS, rules_of
from hybridengine.monitors.health import distinct_ngrams, health, length_correlation
from hybridengine.monitors.rules import Diverging, Rule
from hybridengine.validate.contradictions import validate
from tests.rewards.samples import trajectory


def alarms(rule: Rule | Diverging, *records: Any, metric: str = "x") -> list[int]:
    """Numbers of the records at which it goes off."""
    found = [record if isinstance(record, dict) else {metric: record} for record in records]
    return [i for i, record in enumerate(found) if rule.see(record) is not None]


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values", "at"),
    [
        pytest.param("x > 0.5", [0.4, 0.6, 0.7, 0.5, 0.6], [1, 4], id="at-once-and-again"),
        pytest.param("x > 0.5 for 3", [0.6, 0.6, 0.4, 0.6, 0.6, 0.6, 0.6], [5], id="three-in-a-row"),
        pytest.param("x<0.5 for 2", [0.4, 0.5, 0.4, 0.4], [3], id="without-spaces"),
        pytest.param("x >= 1e-3", [0.0, 0.001], [1], id="exponent"),
        pytest.param("x <= -1", [0.0, -1.0], [1], id="negative"),
        pytest.param("x > 2 * start for 2", [1, 2, 3, 2, 2, 3.9, 4.1, 4.1], [7], id="start-is-the-mean-of-five"),
        pytest.param("x > 0.5 for 2", [0.6, {}, 0.6], [2], id="a-step-without-the-metric"),
        pytest.param("x > 0.5", [float("nan")], [0], id="no-number"),
    ],
)
def test_when_a_rule_goes_off(text: str, values: list[Any], at: list[int]) -> None:
    assert alarms(Rule.parse("r", text), *values) == at


@pytest.mark.parametrize(
    "text", ["x", "x > y", "x = 1", "x > 1 for", "x > 1 for 0", "x > 1.2.3", "> 1", "x > 1 * end", ""], ids=repr
)
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(ValueError, match="monitor.rules.r="):
        Rule.parse("r", text)


def test_reward_that_rises_while_the_held_out_falls() -> None:
    """Four validations, three times in a row apart; a fourth time is no second alarm."""
    records: list[Any] = []
    for training, held_out in [(0.1, 0.5), (0.2, 0.4), (0.3, 0.3), (0.4, 0.2), (0.5, 0.1)]:
        records += [{"reward": training}, {"reward": training, "validation/reward": held_out}]
    assert alarms(Diverging(), *records) == [7]
    for record in records[4:6]:
        record["validation/reward"] = 0.45  # the held-out reward rises once
    assert alarms(Diverging(), *records) == []


def test_configured_rules_replace_and_remove_default_ones() -> None:
    config = MonitorConfig(rules={"clipped": None, "length": "completions/mean_length > 9", "mine": "loss > 3 for 2"})
    rules = {rule.name: rule for rule in rules_of(config, ["second"])}
    assert set(rules) == set(DEFAULTS) - {"clipped"} | {"mine", "held_out", "audit_second"}
    assert isinstance(rules["length"], Rule) and rules["length"].bound == 9
    assert [rule.name for rule in rules_of(MonitorConfig(defaults=False, rules={"a": "x > 1"}))] == ["a"]


def test_rules_on_the_command_line() -> None:
    """As the shell leaves it, without quotes of Hydra's."""
    base = ["model.path=m", "data.train=d", "reward.fn=exact_match"]
    config = build([*base, "monitor.rules.a=completions/clipped_ratio > 0.5 for 3", "monitor.rules.flat_groups=null"])
    assert config.monitor.rules == {"a": "completions/clipped_ratio > 0.5 for 3", "flat_groups": None}
    assert build([*base, "monitor.rules.a='loss < 2 * start'"]).monitor.rules == {"a": "loss < 2 * start"}
    with pytest.raises(ConfigError, match="monitor.rules.a='nonsense'"):
        validate(build([*base, "monitor.rules.a=nonsense"]), World())
    with pytest.raises(ConfigError, match="monitor.action=panic: must be one of warn | stop"):
        validate(build([*base, "monitor.action=panic"]), World())


# -- the monitor -----------------------------------------------------------------------------------


def monitor(action: str = "warn", **rules: str) -> tuple[Monitor, list[str]]:
    said: list[str] = []
    config = MonitorConfig(defaults=False, rules=rules, action=action)
    return Monitor(config, log=said.append, decode=lambda ids: f"decoded {ids}"), said


def test_an_alarm_is_said_once_and_counted_while_it_lasts() -> None:
    watching, said = monitor(high="reward > 1 for 2")
    counts = [watching.check(i, {"reward": value})["monitor/alarms"] for i, value in enumerate([2, 2, 2, 0])]
    assert counts == [0, 1, 1, 0] and not watching.stopped
    assert said == ["ALARM at step 1 (high): reward is 2, > 1 for 2 steps"]
    assert watching.alarms == [(1, "high", "reward is 2, > 1 for 2 steps")]


def test_an_alarm_can_stop_the_run() -> None:
    watching, _ = monitor("stop", high="reward > 1")
    watching.check(1, {"reward": 0.0})
    assert not watching.stopped
    watching.check(2, {"reward": 2.0})
    assert watching.stopped and STOPPED not in (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("differences", "warned", "stopped"),
    [
        pytest.param([1e-6, 0.05, 0.2, 0.05], [], False, id="a-single-step"),
        pytest.param([0.2, 0.2, 0.2], [2], False, id="warned"),
        pytest.param([0.2, 4.0, 4.0], [2, 3], True, id="stopped-whatever-the-action"),
        pytest.param([float("nan"), float("nan")], [2, 2], True, id="no-number"),
    ],
)
def test_a_mismatch_warns_and_then_stops(differences: list[float], warned: list[int], stopped: bool) -> None:
    """Bounds 0.1 and 1 of the mean over a step's tokens, each for two steps in a row."""
    watching = Monitor(MonitorConfig(action="warn"), parity=ParityConfig())
    for step, difference in enumerate(differences, start=1):
        watching.check(step, {"sampling/logp_difference/mean": difference})
    assert [step for step, _, _ in watching.alarms] == warned and watching.stopped == stopped
    off = Monitor(MonitorConfig(), parity=ParityConfig(step_warn=None, step_stop=None))
    assert off.check(1, {"sampling/logp_difference/mean": 9.0}) == off.check(2, {"sampling/logp_difference/mean": 9.0})
    assert not off.alarms


def test_a_resumed_run_remembers_its_start_and_repeats_no_alarm() -> None:
    watching, said = monitor(long="completions/mean_length > 2 * start for 2")
    history = [{"completions/mean_length": value} for value in (1.0, 1.0, 1.0, 1.0, 1.0, 3.0)]
    watching.resume(history)
    assert said == []
    watching.check(7, {"completions/mean_length": 3.0})
    assert len(said) == 1


def test_other_ranks_see_nothing() -> None:
    watching = Monitor(MonitorConfig(), active=False)
    assert watching.look(1, [trajectory()]) == {} and watching.check(1, {"reward": float("nan")}) == {}


def test_a_rule_that_is_none_is_refused_when_the_monitor_is_made() -> None:
    with pytest.raises(ValueError, match="monitor.rules.a='nonsense'"):
        Monitor(MonitorConfig(rules={"a": "nonsense"}))


# -- health ----------------------------------------------------------------------------------------


def test_health_of_a_batch() -> None:
    """Surprisal: 4 tokens of 1 nat and 8 of 2, (4·1 + 8·2) / 12. Distinct 4-grams of 12121212: 2 of 5."""
    short, long = trajectory([1, 2, 3, 0]), trajectory([1, 2, 1, 2, 1, 2, 1, 2])
    short.reward, long.reward = 0.0, 0.0
    short.logprobs, long.logprobs = [-1.0] * 4, [-2.0] * 8
    for one, rewards in zip((short, long), ({"a": 1.0, "audit/b": 0.2}, {"a": 0.0}), strict=True):
        one.rewards = rewards
    found = health([short, long])
    assert found == {
        "completions/surprisal": pytest.approx(20 / 12), "completions/distinct_4grams": 2 / 5,
        "audit/b/disagreement": 1.0, "audit/b/samples": 1.0,
    }  # fmt: skip


def test_correlation_of_reward_and_length_is_within_prompts() -> None:
    """Prompt 0: lengths 2, 4, rewards 1, 3; prompt 1: lengths 8, 6, rewards 0, 2. Centred they are (-1,-1), (1,1),
    (1,-1), (-1,1): the products add up to 0. With rewards 2, 0 for prompt 1 they add up to 4, and so do both sums of
    squares.
    """

    def batch(*rewards: float) -> list[Any]:
        made = [trajectory([1] * n, index=p) for p, n in ((0, 2), (0, 4), (1, 8), (1, 6))]
        for one, reward in zip(made, rewards, strict=True):
            one.reward = reward
        return made

    assert length_correlation(batch(1, 3, 0, 2)) == 0.0
    assert length_correlation(batch(1, 3, 2, 0)) == pytest.approx(1.0)
    assert length_correlation(batch(1, 1, 2, 2)) is None and length_correlation([]) is None


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4, 5], 1.0), ([7] * 10, 1 / 7), ([1, 2] * 4, 2 / 5)], ids=["all", "one", "two"]
)
def test_distinct_ngrams(tokens: list[int], share: float) -> None:
    assert distinct_ngrams(tokens) == pytest.approx(share)


# -- a flat reward ---------------------------------------------------------------------------------


def scored(*rewards: float, **parts: float) -> list[Any]:
    batch = [trajectory([1, 2], index=i) for i in range(len(rewards))]
    for one, reward in zip(batch, rewards, strict=True):
        one.reward, one.rewards = reward, {"main": reward, **parts}
    return batch


def test_a_reward_of_0_everywhere_is_said_with_an_example() -> None:
    watching, said = monitor()
    for step in (1, 2, 3, 4):
        watching.look(step, scored(0.0, 0.0))
    assert len(said) == 2
    assert said[0].startswith("WARNING: reward 0 for every response of step 1")
    for part in ("prompt   2+3=", "response decoded [1, 2]", "answer   '5'", "returned main=0"):
        assert part in said[0]
    assert "of the first 3 steps; NOTHING HAS BEEN LEARNT" in said[1]


def test_any_constant_counts_and_a_difference_does_not() -> None:
    watching, said = monitor()
    watching.look(1, scored(0.7, 0.7))
    watching.look(2, scored(0.7, 0.8))
    watching.look(3, scored(0.7, 0.7))
    assert len(said) == 1 and "reward 0.7 for every response" in said[0]


def test_a_term_that_is_always_the_same_is_named() -> None:
    watching, said = monitor()
    for step in (1, 2, 3):
        watching.look(step, scored(0.0, 1.0, form=1.0))
    assert len(said) == 1 and "the same for every response of the first 3 steps: form (1)" in said[0]
