"""Reward functions, how they are found and checked, and the scorer that runs them."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import RewardConfig, RewardTerm
from hybridengine.rewards.base import RewardError, RewardFunction
from hybridengine.rewards.builtin import exact_match, format_match, reasoning_gym, regex_match
from hybridengine.rewards.load import load_function, load_rewards
from hybridengine.rewards.scorer import Scorer
from hybridengine.types import Prompt, Trajectory


class Words:
    """Token i is the i-th word; 0 is the end token."""

    def __init__(self, *words: str) -> None:
        self._words = ("<end>", *words)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(self._words[i] for i in token_ids if i)


def trajectory(
    token_ids: list[int] | None = None, *, index: int = 7, answer: Any = "5", truncated: bool = False, **metadata: Any
) -> Trajectory:
    ids = [1, 0] if token_ids is None else token_ids
    return Trajectory(
        prompt=Prompt(index=index, token_ids=[3], text="2+3=", answer=answer, metadata=metadata),
        sample_index=2,
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        versions=[0] * len(ids),
        truncated=truncated,
    )


def scorer(*words: str, **config: Any) -> Scorer:
    return Scorer(RewardConfig(**config), Words(*words))


# -- built-ins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "kwargs", "reward"),
    [
        pytest.param(" 95\n", 95, {}, 1.0, id="white-space-and-int"),
        pytest.param("95.", "95", {}, 0.0, id="more-text"),
        pytest.param("Paris", "paris", {}, 0.0, id="case"),
        pytest.param("Paris", "paris", {"ignore_case": True}, 1.0, id="ignore-case"),
        pytest.param("", "0", {}, 0.0, id="empty"),
    ],
)
def test_exact_match(response: str, answer: Any, kwargs: Any, reward: float) -> None:
    assert exact_match("", response, answer, **kwargs) == reward


@pytest.mark.parametrize(
    ("response", "kwargs", "reward"),
    [
        pytest.param("2 + 3 = 5.", {"pattern": r"-?\d+"}, 1.0, id="last-number"),
        pytest.param("5 is 2 + 3", {"pattern": r"-?\d+"}, 0.0, id="last-is-another"),
        pytest.param("5 is 2 + 3", {"pattern": r"-?\d+", "select": "first"}, 1.0, id="first"),
        pytest.param("<answer> 5 </answer> 6", {"pattern": "<answer>(.*?)</answer>"}, 1.0, id="group"),
        pytest.param("five", {"pattern": r"\d+"}, 0.0, id="no-match"),
    ],
)
def test_regex(response: str, kwargs: Any, reward: float) -> None:
    assert regex_match("", response, "5", **kwargs) == reward


def test_format() -> None:
    pattern = "<think>.*</think><answer>.*</answer>"
    assert format_match("", " <think>a\nb</think><answer>5</answer>\n", None, pattern=pattern) == 1.0
    assert format_match("", "<think>a</think><answer>5</answer> and more", None, pattern=pattern) == 0.0


def gym_row() -> dict[str, Any]:
    factory = pytest.importorskip("reasoning_gym.factory")
    kwargs = {"min_terms": 2, "max_terms": 2}
    entry = factory.create_dataset("chain_sum", size=1, seed=3, **kwargs)[0]
    return {"task": "chain_sum", "kwargs": kwargs, "entry": entry}


def test_reasoning_gym_scores_by_the_task() -> None:
    row = gym_row()
    answer = row["entry"]["answer"]
    assert reasoning_gym("", answer, answer, metadata=row) == 1.0
    partial = reasoning_gym("", f"It is {answer}", answer, metadata=row)
    assert 0 < partial < 1
    assert reasoning_gym("", f"It is {answer}", answer, metadata=row, pattern=r"-?\d+") == 1.0
    assert reasoning_gym("", "I don't know", answer, metadata=row, pattern=r"-?\d+") == 0.0


def test_reasoning_gym_parser_that_raises_counts_as_wrong() -> None:
    """prime_factorization's own scorer raises ValueError on text without numbers."""
    factory = pytest.importorskip("reasoning_gym.factory")
    entry = factory.create_dataset("prime_factorization", size=1, seed=3)[0]
    row = {"task": "prime_factorization", "kwargs": {}, "entry": entry}
    assert reasoning_gym("", "who knows?", entry["answer"], metadata=row) == 0.0
    assert reasoning_gym("", entry["answer"], entry["answer"], metadata=row) == 1.0


def test_reasoning_gym_needs_its_rows() -> None:
    with pytest.raises(ValueError, match="the row has no task, kwargs, entry"):
        reasoning_gym("", "5", "5", metadata={})


# -- mathematics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        pytest.param("so \\boxed{\\frac{1}{2}}", "0.5", 1.0, id="fraction"),
        pytest.param("x = 3, hence \\boxed{4}, not 5", "4", 1.0, id="boxed-first"),
        pytest.param("The answer is 1,000.", "1000", 1.0, id="thousands"),
        pytest.param("$(x+1)^2$", "$x^2+2x+1$", 1.0, id="algebra"),
        pytest.param("\\boxed{7}", "8", 0.0, id="wrong"),
        pytest.param("no idea", "8", 0.0, id="no-answer"),
    ],
)
def test_math(response: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    from hybridengine.rewards.math import math_reward

    assert math_reward("", response, answer, limit_seconds=60) == reward


def test_math_works_on_several_threads_at_once() -> None:
    pytest.importorskip("math_verify")
    config = {"fn": "math", "timeout_seconds": 60.0, "workers": 2}
    scoring = scorer("$\\frac{10}{2}$", "6", **config)
    batch = [trajectory([1 + i % 2, 0], index=i) for i in range(8)]
    scoring.score(batch)
    assert [t.reward for t in batch] == [1.0, 0.0] * 4


def test_math_that_takes_too_long_is_killed_and_counts_as_wrong() -> None:
    """A factorial that sympy would work on for minutes; the next comparison gets a new child."""
    pytest.importorskip("math_verify")
    from hybridengine.rewards.math import MathVerifier

    verifier = MathVerifier()
    try:
        assert verifier.score("5", "5", limit_seconds=60) == 1.0
        started = time.monotonic()
        assert verifier.score("$(10^{8})!$", "7", limit_seconds=1.0) == 0.0
        assert time.monotonic() - started < 20
        assert verifier.num_timeouts == 1
        assert verifier.score("5", "5", limit_seconds=60) == 1.0
    finally:
        verifier.close()


def test_math_child_that_dies_is_reported_and_replaced() -> None:
    pytest.importorskip("math_verify")
    from hybridengine.rewards.math import MathVerifier

    verifier = MathVerifier()
    try:
        assert verifier.score("5", "5", limit_seconds=60) == 1.0
        for child in list(verifier._all):
            child._process.kill()
            child._process.wait()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            verifier.score("5", "5", limit_seconds=60)
        assert verifier.score("5", "5", limit_seconds=60) == 1.0
    finally:
        verifier.close()


# -- finding functions ---------------------------------------------------------------------------------


def write_rewards(path: Path, body: str, name: str = "my_rewards.py") -> str:
    (path / name).write_text(body)
    return str(path / name)


def test_function_from_a_file(tmp_path: Path) -> None:
    source = write_rewards(
        tmp_path, "def brevity(prompt, response, answer, *, scale):\n    return scale / len(response)\n"
    )
    scoring = scorer("abcd", fn=f"{source}:brevity", kwargs={"scale": 2.0})
    batch = [trajectory()]
    scoring.score(batch)
    assert batch[0].reward == 0.5 and batch[0].rewards == {"brevity": 0.5}


def test_function_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rewards(tmp_path, "def one(*args, **kwargs):\n    return 1\n", "reward_module_for_test.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("reward_module_for_test:one")() == 1
    sys.modules.pop("reward_module_for_test")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("exact_mach", "no such reward; give exact_match", id="unknown-name"),
        pytest.param("nowhere.py:f", "no such file", id="missing-file"),
        pytest.param("{file}:g", "has no function 'g'; it has f", id="missing-function"),
        pytest.param("{broken}:f", "ZeroDivisionError", id="file-that-fails"),
        pytest.param("no_such_package.module:f", "ModuleNotFoundError", id="missing-module"),
    ],
)
def test_function_not_found(tmp_path: Path, spec: str, message: str) -> None:
    file = write_rewards(tmp_path, "def f(prompt, response, answer): return 0\n")
    broken = write_rewards(tmp_path, "1 / 0\n", "broken.py")
    with pytest.raises(ValueError, match=message):
        load_function(spec.format(file=file, broken=broken))


def test_no_reward_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"set reward\.fn to exact_match"):
        load_rewards(RewardConfig())


def test_kwargs_without_function() -> None:
    with pytest.raises(ValueError, match="without reward.fn"):
        load_rewards(RewardConfig(kwargs={"a": 1}, terms={"t": RewardTerm(fn="exact_match")}))


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        pytest.param(lambda prompt, response: 0.0, {}, "can't be called", id="too-few-parameters"),
        pytest.param(lambda p, r, a: 0.0, {"colour": 1}, "colour", id="unknown-kwarg"),
        pytest.param(lambda p, r, a, *, scale: 0.0, {}, "scale", id="missing-kwarg"),
        pytest.param(lambda p, r, a, **kw: 0.0, {"metadata": {}}, "the trainer passes it", id="reserved-kwarg"),
    ],
)
def test_signature_is_checked_at_the_start(function: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction("r", function, kwargs=kwargs)


def test_what_a_function_receives() -> None:
    seen: list[Any] = []

    def everything(*args: Any, **kwargs: Any) -> float:
        seen.append((args, kwargs))
        return 0.0

    def part(prompt: str, response: str, answer: Any, *, truncated: bool) -> float:
        seen.append(truncated)
        return 0.0

    one = trajectory([1], truncated=True, level=3)
    RewardFunction("r", everything, kwargs={"x": 1})(one, "text")
    RewardFunction("r", part, kwargs={})(one, "text")
    expected = {"metadata": {"level": 3}, "truncated": True, "token_ids": [1], "x": 1}
    assert seen == [(("2+3=", "text", "5"), expected), True]


# -- results -------------------------------------------------------------------------------------------


def test_results_that_are_numbers() -> None:
    import numpy
    import torch

    for value in (True, 1, 1.0, numpy.float32(1), numpy.bool_(True), numpy.ones(1), torch.tensor(1.0)):
        reward = RewardFunction("r", lambda p, r, a, value=value: value, kwargs={"value": value})
        result = reward(trajectory(), "")
        assert result == 1.0 and type(result) is float


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0, 2.0]], ids=repr)
def test_results_that_are_not(value: Any) -> None:
    reward = RewardFunction("strange", lambda p, r, a: value, kwargs={})
    with pytest.raises(RewardError, match="reward strange on prompt 7, sample 2: returned .* expected a finite number"):
        reward(trajectory(), "")


# -- scorer --------------------------------------------------------------------------------------------


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


def test_scoring_overlaps_with_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function runs before collect() is called, and on another thread."""
    ran = threading.Event()
    threads = []

    def watch(prompt: str, response: str, answer: Any) -> float:
        threads.append(threading.current_thread())
        ran.set()
        return 1.0

    monkeypatch.setitem(sys.modules[__name__].__dict__, "watch", watch)
    scoring = scorer("5", fn=f"{__name__}:watch")
    one = trajectory()
    scoring.submit(one)
    assert ran.wait(10)
    assert scoring.collect() == [one] and one.reward == 1.0
    assert threads[0] is not threading.main_thread()
    assert scoring.collect() == []


def raises_on_six(prompt: str, response: str, answer: Any) -> float:
    if response == "6":
        raise KeyError("six")
    return 1.0


def test_a_function_that_raises_fails_the_step_by_name() -> None:
    scoring = scorer("5", "6", fn=f"{__name__}:raises_on_six", workers=2)
    batch = [trajectory([1 + (i == 3), 0], index=i) for i in range(6)]
    with pytest.raises(RewardError, match="reward raises_on_six on prompt 3, sample 2: KeyError: 'six'") as caught:
        scoring.score(batch)
    assert isinstance(caught.value.__cause__, KeyError)
    good = [trajectory()]
    scoring.score(good)  # and the scorer still works
    assert good[0].reward == 1.0


def hangs_on_six(prompt: str, response: str, answer: Any) -> float:
    if response == "6":
        time.sleep(30)
    return 1.0


def test_a_function_that_hangs_fails_the_step_by_name() -> None:
    scoring = scorer("5", "6", fn=f"{__name__}:hangs_on_six", workers=1, timeout_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(RewardError, match="reward hangs_on_six on prompt 1.*reward.timeout_seconds=0.3"):
        scoring.score([trajectory([1, 0], index=0), trajectory([2, 0], index=1), trajectory([1, 0], index=2)])
    assert time.monotonic() - started < 10
    good = [trajectory()]
    scoring.score(good)
    assert good[0].reward == 1.0


def slow(prompt: str, response: str, answer: Any) -> float:
    time.sleep(0.15)
    return 1.0


def test_the_time_limit_counts_from_the_call_not_from_the_queue() -> None:
    scoring = scorer("5", fn=f"{__name__}:slow", workers=1, timeout_seconds=0.5)
    batch = [trajectory(index=i) for i in range(6)]  # 0.9 s in total
    scoring.score(batch)
    assert all(t.reward == 1.0 for t in batch)


def test_the_last_time_limit_of_several_functions_is_each_ones_own() -> None:
    terms = {name: RewardTerm(fn=f"{__name__}:slow") for name in ("a", "b", "c", "d", "e")}
    scoring = scorer("5", terms=terms, timeout_seconds=0.5)
    batch = [trajectory()]
    scoring.score(batch)
    assert batch[0].reward == 5.0
