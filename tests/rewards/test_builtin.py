"""Built-in reward functions, how functions are found, and what of the data they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import AuditTerm, RewardConfig, RewardTerm
from hybridengine.rewards.builtin import BUILTIN, exact_match, format_match, reasoning_gym, regex_match
from hybridengine.rewards.decode import Decoder
from hybridengine.rewards.load import load_audits, load_function, load_rewards, reward_names
from hybridengine.types import Prompt
from tests.rewards.samples import Words, scorer, trajectory

FUNCTIONS = "tests.rewards.functions"


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


def test_regex_that_is_none() -> None:
    with pytest.raises(ValueError, match="pattern='\\('"):
        regex_match("", "5", "5", pattern="(")


def test_format() -> None:
    pattern = "<think>.*</think><answer>.*</answer>"
    assert format_match("", " <think>a\nb</think><answer>5</answer>\n", None, pattern=pattern) == 1.0
    assert format_match("", "<think>a</think><answer>5</answer> and more", None, pattern=pattern) == 0.0


def gym_row(task: str = "chain_sum", **kwargs: Any) -> dict[str, Any]:
    factory = pytest.importorskip("reasoning_gym.factory")
    entry = factory.create_dataset(task, size=1, seed=3, **kwargs)[0]
    return {"task": task, "kwargs": kwargs, "entry": entry}


def test_reasoning_gym_scores_by_the_task() -> None:
    row = gym_row(min_terms=2, max_terms=2)
    answer = row["entry"]["answer"]
    assert reasoning_gym("", answer, answer, metadata=row) == 1.0
    partial = reasoning_gym("", f"It is {answer}", answer, metadata=row)
    assert 0 < partial < 1
    assert reasoning_gym("", f"It is {answer}", answer, metadata=row, pattern=r"-?\d+") == 1.0
    assert reasoning_gym("", "I don't know", answer, metadata=row, pattern=r"-?\d+") == 0.0


def test_reasoning_gym_parser_that_raises_counts_as_wrong() -> None:
    """prime_factorization's own scorer raises ValueError on text without numbers."""
    row = gym_row("prime_factorization")
    assert reasoning_gym("", "who knows?", row["entry"]["answer"], metadata=row) == 0.0
    assert reasoning_gym("", row["entry"]["answer"], row["entry"]["answer"], metadata=row) == 1.0


def test_reasoning_gym_needs_its_rows() -> None:
    with pytest.raises(ValueError, match="the row has no task, kwargs, entry"):
        reasoning_gym("", "5", "5", metadata={})


# -- finding functions -----------------------------------------------------------------------------


def write_rewards(path: Path, body: str, name: str = "my_rewards.py") -> str:
    (path / name).write_text(body)
    return str(path / name)


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "isolated"])
def test_function_from_a_file(tmp_path: Path, isolate: bool) -> None:
    body = "def brevity(prompt, response, answer, *, scale):\n    return scale / len(response)\n"
    source = write_rewards(tmp_path, body)
    scoring = scorer("abcd", fn=f"{source}:brevity", kwargs={"scale": 2.0}, isolate=isolate)
    batch = [trajectory([1])]
    scoring.score(batch)
    assert batch[0].reward == 0.5 and batch[0].rewards == {"brevity": 0.5}
    scoring.close()


def test_function_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rewards(tmp_path, "def one(*args, **kwargs):\n    return 1\n", "reward_module_for_test.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("reward_module_for_test:one")() == 1
    sys.modules.pop("reward_module_for_test")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("exact_mach", "no such reward; give exact_match", id="unknown-name"),
        pytest.param("format.check", "no such reward", id="check-that-is-none"),
        pytest.param("nowhere.py:f", "no such file", id="missing-file"),
        pytest.param("{file}:g", "has no 'g'; it has f", id="missing-function"),
        pytest.param("{broken}:f", "ZeroDivisionError", id="file-that-fails"),
        pytest.param("{exits}:f", "SystemExit: 0", id="file-that-exits"),
        pytest.param("no_such_package.module:f", "ModuleNotFoundError", id="missing-module"),
    ],
)
def test_function_not_found(tmp_path: Path, spec: str, message: str) -> None:
    file = write_rewards(tmp_path, "def f(prompt, response, answer): return 0\n")
    broken = write_rewards(tmp_path, "1 / 0\n", "broken.py")
    exits = write_rewards(tmp_path, "import sys\nsys.exit(0)\n", "exits.py")
    with pytest.raises(ValueError, match=message):
        load_function(spec.format(file=file, broken=broken, exits=exits))


def test_no_reward_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"set reward\.fn to exact_match"):
        load_rewards(RewardConfig())


def test_kwargs_without_function() -> None:
    with pytest.raises(ValueError, match="without reward.fn"):
        load_rewards(RewardConfig(kwargs={"a": 1}, terms={"t": RewardTerm(fn="exact_match")}))


def test_terms_inherit_and_override() -> None:
    config = RewardConfig(
        fn=f"{FUNCTIONS}:length", isolate=True, on_error="zero", timeout_seconds=3.0,
        terms={"b": RewardTerm(fn=f"{FUNCTIONS}:busy", isolate=False, on_error="raise", timeout_seconds=1.0)},
        audit={"c": AuditTerm(fn="exact_match", share=0.5)},
    )  # fmt: skip
    first, second = load_rewards(config)
    assert (first.isolated, first.on_error, first.timeout_seconds) == (True, "zero", 3.0)
    assert (second.isolated, second.on_error, second.timeout_seconds) == (False, "raise", 1.0)
    (audit,) = load_audits(config)
    assert (audit.name, audit.weight, audit.share) == ("audit/c", 0.0, 0.5)
    assert reward_names(config) == ["length", "b", "audit/c"]


def test_what_reads_a_models_text_by_parsing_it_is_always_isolated() -> None:
    assert [name for name, builtin in BUILTIN.items() if not builtin.isolated] == ["exact_match", "served"]
    with pytest.raises(ValueError, match="isolate=false: math reads what a model wrote"):
        load_rewards(RewardConfig(terms={"m": RewardTerm(fn="math", isolate=False)}))


def test_code_keeps_its_own_limit_below_the_calls() -> None:
    (code,) = load_rewards(RewardConfig(fn="code", timeout_seconds=20.0))
    assert code.kwargs == {"program_seconds": 18.0}


# -- answers ---------------------------------------------------------------------------------------


def prompts(*answers: Any) -> list[Prompt]:
    return [Prompt(index=i, token_ids=[1], text=f"q{i}", answer=answer) for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("fn", "kwargs", "answers", "message"),
    [
        pytest.param("exact_match", {}, ["1", None], "row 1 .*which is None", id="null"),
        pytest.param("exact_match", {}, ["1", 2, " "], "row 2 .*empty", id="empty"),
        pytest.param("regex", {"pattern": "a"}, [{"ground_truth": "1"}], "row 0 .*the answer is a dict", id="dict"),
        pytest.param("math", {}, ["1", r"\frac{1}{", "2"], r"1 of 3 rows .*row 1 \('q1'\)", id="latex"),
        pytest.param("math", {"percent": "value"}, [None], "row 0 .*which is None", id="math-null"),
        pytest.param("code", {}, ['{"tests": []}'], "row 0 .*has no tests", id="no-tests"),
    ],
)
def test_answers_that_are_refused_at_the_start_by_row(fn: str, kwargs: Any, answers: list[Any], message: str) -> None:
    scoring = scorer("x", fn=fn, kwargs=kwargs)
    with pytest.raises(ValueError, match=message):
        scoring.check(prompts(*answers))
    scoring.close()


def test_answers_that_are_fine() -> None:
    scoring = scorer("x", fn="math")
    scoring.check(prompts(*range(1000)))
    scoring.check([])
    scoring.close()


# -- text ------------------------------------------------------------------------------------------


def test_special_tokens_reach_the_format_reward_and_whoever_asks() -> None:
    """<think> is token 1 and special; the end token is in no text."""
    words = Words("<think>", "deep", "</think>", "5", special=("<think>", "</think>"))
    tokens = [1, 2, 3, 4, 0]
    decoded = Decoder(words).decode(tokens)
    assert (decoded.plain, decoded.special) == ("deep 5", "<think> deep </think> 5")
    assert Decoder(words, skip_special_tokens=False).decode(tokens).plain == "<think> deep </think> 5"
    assert Decoder(words).decode([4, 0]).special == "5"
