"""What a function is called with, told from its parameters' names, and what it may return."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from hybridengine.rewards import signatures
from hybridengine.rewards.base import RewardError, RewardFunction
from hybridengine.rewards.signatures import Call, ResultError, Value, call, check_columns, recognise
from tests.rewards import functions
from tests.rewards.samples import trajectory

ROW = {"data_source": "gsm8k", "extra_info": {"split": "train"}, "solution": "5"}


def calls(*responses: str, answer: Any = "5", messages: Any = None, **metadata: Any) -> list[Call]:
    return [
        Call(
            prompt="2+3=", response=r, answer=answer, answer_key="solution", metadata=ROW | metadata, messages=messages
        )
        for r in responses
    ]


# -- recognition -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "batch", "form"),
    [
        pytest.param(functions.length, None, signatures.SAMPLE, id="ours"),
        pytest.param(lambda *args, **kwargs: 0, None, signatures.SAMPLE, id="anything"),
        pytest.param(functions.lists, None, signatures.BATCH, id="lists-by-name"),
        pytest.param(lambda p, r, a: [], True, signatures.BATCH, id="lists-by-configuration"),
        pytest.param(functions.verl, None, signatures.VERL, id="verl"),
        pytest.param(functions.verl_batch, None, signatures.VERL_BATCH, id="verl-batch"),
        pytest.param(functions.trl, None, signatures.TRL, id="trl"),
        pytest.param(functions.trl, True, signatures.TRL, id="trl-said-to-take-lists"),
        pytest.param(functions.judge, None, signatures.SAMPLE, id="async"),
    ],
)
def test_form_of_a_signature(function: Any, batch: bool | None, form: str) -> None:
    assert recognise(function, batch=batch) == form


def test_batch_that_contradicts_the_names() -> None:
    with pytest.raises(ValueError, match="batch=false, but the parameters .*'completions'.* are those of form 'trl'"):
        RewardFunction("r", functions.trl, kwargs={}, batch=False)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        pytest.param(lambda prompt, response: 0.0, {}, "can't be called", id="too-few-parameters"),
        pytest.param(lambda p, r, a: 0.0, {"colour": 1}, "colour", id="unknown-kwarg"),
        pytest.param(lambda p, r, a, *, scale: 0.0, {}, "scale", id="missing-kwarg"),
        pytest.param(lambda p, r, a, **kw: 0.0, {"metadata": {}}, "the trainer passes it", id="reserved-kwarg"),
        pytest.param(lambda solution_str, other: 0.0, {}, "other", id="verl-with-another-parameter"),
        pytest.param(lambda solution_str, **kw: 0.0, {"data_source": 1}, "the trainer passes it", id="verl-reserved"),
        pytest.param(lambda responses: 0.0, {}, "prompts, responses, answers", id="lists-with-too-few"),
        pytest.param(lambda completions, *, scale: 0.0, {"colour": 1}, "colour", id="trl-unknown-kwarg"),
    ],
)
def test_signature_is_checked_at_the_start(function: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction("r", function, kwargs=kwargs)


def test_trl_function_whose_column_the_data_lacks() -> None:
    check_columns(functions.trl, signatures.TRL, {}, calls("5")[0])
    row = Call(prompt="", response="", metadata={"level": 3})
    with pytest.raises(ValueError, match="it needs the column solution; the data has answer, completion_ids, .*level"):
        check_columns(functions.trl, signatures.TRL, {}, row)


# -- calls -----------------------------------------------------------------------------------------


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


def test_verl_function_is_given_verls_columns() -> None:
    """Called as (prompt, response, answer) it would compare with the wrong things and score 0 for ever."""
    assert call(functions.verl, signatures.VERL, calls("5"), {}) == [Value(1.0, {"acc": 1.0})]
    assert call(functions.verl, signatures.VERL, calls("6"), {}) == [Value(0.0, {"acc": 0.0})]
    assert call(functions.verl_batch, signatures.VERL_BATCH, calls("5", "6"), {}) == [Value(1.0), Value(0.0)]


def test_verl_ground_truth_comes_from_its_column_when_no_answer_is_configured() -> None:
    rows = calls("5", answer=None, reward_model={"style": "rule", "ground_truth": "5"})
    assert call(functions.verl, signatures.VERL, rows, {})[0].score == 1.0


def test_verl_function_without_some_of_the_parameters() -> None:
    def short(solution_str: str, ground_truth: str, *, scale: float) -> float:
        return scale * (solution_str == ground_truth)

    assert call(short, recognise(short), calls("5"), {"scale": 2.0}) == [Value(2.0)]


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "2+3="}]], ids=["plain", "chat"])
def test_trl_function_is_given_lists_and_columns(messages: Any) -> None:
    functions.EVENTS.clear()
    found = call(functions.trl, signatures.TRL, calls("5", "6", "skip", messages=messages), {})
    assert found == [Value(1.0), Value(0.0), Value(None)]
    assert functions.EVENTS == [["answer", "completion_ids", "data_source", "extra_info", "prompts"]]


def test_lists_in_order() -> None:
    functions.EVENTS.clear()
    assert call(functions.lists, signatures.BATCH, calls("a", "bbb", "", "cc", "d"), {}) == [
        Value(float(n)) for n in (1, 3, 0, 2, 1)
    ]
    assert functions.EVENTS == [(["a", "bbb", "", "cc", "d"], ["5"] * 5)]


def test_async_function_called_here_is_run_to_its_end() -> None:
    assert call(functions.judge, signatures.SAMPLE, calls("x"), {"seconds": 0.0}) == [Value(1.0)]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, numpy.float32(1), numpy.bool_(True), numpy.ones(1), torch.tensor(1.0)],
    ids=lambda value: type(value).__name__,
)
def test_results_that_are_numbers(value: Any) -> None:
    result = RewardFunction("r", lambda p, r, a, value: value, kwargs={"value": value})(trajectory(), "")
    assert result == 1.0 and type(result) is float


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0, 2.0], {"score": 1.0}], ids=repr)
def test_results_that_are_not(value: Any) -> None:
    reward = RewardFunction("strange", lambda p, r, a: value, kwargs={})
    with pytest.raises(RewardError, match="reward strange on prompt 7, sample 2: returned .* expected a finite number"):
        reward(trajectory(), "")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        pytest.param([1.0], r"returned 1 values, expected a list of 2", id="too-few"),
        pytest.param([1.0, 2.0, 3.0], r"returned 3 values, expected a list of 2", id="too-many"),
        pytest.param(1.0, r"returned 1.0, expected a list of 2", id="a-number"),
        pytest.param([1.0, None], r"returned None, expected a finite number", id="none-inside"),
    ],
)
def test_lists_that_are_not(result: Any, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        call(lambda p, r, a: result, signatures.BATCH, calls("a", "b"), {})


def test_arrays_are_lists() -> None:
    assert call(lambda p, r, a: torch.tensor([1.0, 2.0]), signatures.BATCH, calls("a", "b"), {})[1] == Value(2.0)


def test_verl_dict_without_a_score() -> None:
    with pytest.raises(ResultError, match="without 'score'"):
        call(lambda solution_str: {"acc": 1.0}, signatures.VERL, calls("a"), {})


def test_a_signature_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs as much as a short function's call, and a step has thousands. A function need not be hashable."""

    class Mine(list):  # type: ignore[type-arg]
        def __call__(self, prompt: str, response: str, answer: Any, *, truncated: bool) -> float:
            return 2.0 if truncated else 1.0

    read: list[Any] = []
    plain = signatures.inspect.signature
    monkeypatch.setattr(signatures.inspect, "signature", lambda function: read.append(function) or plain(function))
    for function in (Mine(), lambda p, r, a: 1.0):
        assert [call(function, signatures.SAMPLE, calls("a"), {}) for _ in range(3)] == [[Value(1.0)]] * 3
    assert len(read) == 2
