"""pass@k, majority@k, intervals, columns; and an evaluation equal to the run's own validation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import RewardConfig
from hybridengine.config.compose import ConfigError
from hybridengine.evaluate.measure import _parser, read_ks, read_subject
from hybridengine.evaluate.passk import majority_at_k, pass_at_k
from hybridengine.evaluate.report import summarize_evaluation, tables, vote_of
from hybridengine.report.summary import wilson_interval
from hybridengine.types import Prompt, Trajectory


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 3, 5, 0.91667), (5, 0, 3, 0.0), (5, 5, 1, 1.0), (5, 3, 3, 1.0), (4, 1, 4, 1.0)],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    """n = 10, c = 3, k = 5: 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252."""
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        ("778", "7", 3, 1.0),
        ("788", "7", 3, 0.0),
        ("78", "7", 2, 0.5),  # a tie
        ("778", "7", 1, 2 / 3),  # one sample is its own majority
        ("7788", "7", 3, 0.5),  # of the four subsets, two have two 7s
        ("7-", "7", 2, 1.0),  # "-" is no answer and has no vote
        ("--", "7", 2, 0.0),
    ],
)
def test_majority_at_k(answers: str, right: str, k: int, expected: float) -> None:
    votes = [None if a == "-" else a for a in answers]
    assert majority_at_k(votes, [a == right for a in answers], k) == pytest.approx(expected)


def test_majority_of_many_samples_is_drawn() -> None:
    """40 samples, 24 right: of 21 drawn, at least 11 are right with the hypergeometric probability 0.8749."""
    from math import comb

    answers = ["7"] * 24 + ["8"] * 16
    exact = sum(comb(24, r) * comb(16, 21 - r) for r in range(11, 22)) / comb(40, 21)
    assert majority_at_k(answers, [a == "7" for a in answers], 21) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize(
    ("text", "reward", "vote"),
    [
        (r"so \boxed{1} or \boxed{ \frac{1}{2} }", {"fn": "math"}, r"\frac{1}{2}"),
        (r"\boxed{1", {"fn": "math"}, None),
        ("it is 5, no, -7.", {"fn": "regex", "kwargs": {"pattern": r"-?\d+"}}, "-7"),
        ("none", {"fn": "regex", "kwargs": {"pattern": r"\d+"}}, None),
        ("1200\n#### 1200", {"fn": "math"}, "1200"),
        ("The Answer: Yes.", {"fn": "exact_match"}, "yes"),
        (" 95 ", {"fn": "exact_match"}, "95"),
        ("", {"fn": "exact_match"}, None),
    ],
)
def test_votes(text: str, reward: dict[str, Any], vote: str | None) -> None:
    assert vote_of(text, RewardConfig(**reward)) == vote


def sample(index: int, k: int, right: bool, level: str) -> Trajectory:
    prompt = Prompt(index=index, token_ids=[1], metadata={"info": {"level": level}})
    return Trajectory(
        prompt=prompt, sample_index=k, token_ids=[right] * (1 + k), logprobs=[], versions=[], truncated=k == 1,
        reward=float(right), rewards={"match": float(right)},
    )  # fmt: skip


def test_summary_by_a_column() -> None:
    """Two easy prompts (2 of 2 and 1 of 2 right) and one hard one (0 of 2)."""
    found = [
        sample(index, k, right, level)
        for index, (level, rights) in enumerate([("easy", [1, 1]), ("easy", [1, 0]), ("hard", [0, 0])])
        for k, right in enumerate(map(bool, rights))
    ]
    summary = summarize_evaluation(
        found, RewardConfig(fn="exact_match"), lambda t: str(t[0]), ks=[1, 2], by="info.level"
    )
    assert summary["accuracy"] == pytest.approx(0.5) and summary["pass@1"] == pytest.approx(0.5)
    assert summary["pass@2"] == pytest.approx(2 / 3) and summary["majority@2"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert summary["accuracy_interval"] == list(wilson_interval(1.5, 3))
    assert (summary["prompts"], summary["samples"], summary["mean_length"], summary["truncated"]) == (3, 6, 1.5, 0.5)
    by = summary["by"]["values"]
    assert (by["easy"]["accuracy"], by["easy"]["prompts"], by["hard"]["accuracy"]) == (0.75, 2, 0.0)
    assert len(tables({"name": "x", **summary})) == 2
    with pytest.raises(ConfigError, match="--by level: no such column; there are info"):
        summarize_evaluation(found, RewardConfig(fn="exact_match"), str, ks=[1], by="level")


@pytest.mark.parametrize(("text", "n", "expected"), [("", 1, [1]), ("", 8, [1, 8]), ("4,1", 8, [1, 4])])
def test_ks(text: str, n: int, expected: list[int]) -> None:
    assert read_ks(text, n) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("a", "numbers with commas"), ("9", "must be 1 to rollout.validation.n=8"), ("0", "must be 1")],
)
def test_ks_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ks(text, 8)


def subject(*arguments: object) -> Any:
    return read_subject(_parser().parse_intermixed_args([str(argument) for argument in arguments]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "epoch=3"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    return path


def test_a_model_is_measured_on_all_prompts_of_a_file(model: Path) -> None:
    keys = ["data.validation=[a.jsonl,b.jsonl]", "reward=math", "rollout.validation.n=4"]
    found = subject(model, *keys)
    assert found.config.model.path == str(model) and found.config.data.train == ["a.jsonl", "b.jsonl"]
    assert found.config.data.validation_size > 10**6 and found.config.rollout.validation.n == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3", "data.validation=x", "reward=math"], "--step and --best choose a checkpoint of a run"),
        (["data.validation=x", "beta=1"], "did you mean 'algorithm.kl_coef'"),
        (["data.validation=x", "nothing"], "'nothing' is no override"),
    ],
)
def test_refused(model: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        subject(model, *arguments)
    with pytest.raises(ConfigError, match="no checkpoints; give a run's directory"):
        subject(model.parent / "nowhere")


def test_a_run_s_configuration_goes_on(tmp_path: Path, model: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    config = {
        "model": {"path": str(model)}, "data": {"train": "arithmetic", "kwargs": {}}, "seed": 5,
        "placement": {"name": "disaggregated"}, "schedule": {"name": "async"}, "reward": {"fn": "math", "terms": {}},
        "a_key_of_an_older_version": 1,
    }  # fmt: skip
    (checkpoint / "meta.json").write_text(json.dumps({"step": 4, "config": config}))
    for place in (tmp_path, checkpoint):
        found = subject(place, "--k", "1", "rollout.validation.n=2")
        assert (found.config.seed, found.config.placement.name, found.config.schedule.name) == (5, "colocated", "sync")
        assert found.model_path == model and found.step == 4 and found.checkpoint == checkpoint
