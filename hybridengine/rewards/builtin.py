"""Reward functions that come with the package, and the names they are configured by."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridengine.data.sources import make_reasoning_gym
from hybridengine.rewards.code import check_tests, code_reward
from hybridengine.rewards.math import check_golds, math_reward
from hybridengine.rewards.math_verify import math_verify_reward
from hybridengine.rewards.served import served

logger = logging.getLogger(__name__)


def exact_match(prompt: str, response: str, answer: Any, *, ignore_case: bool = False) -> float:
    """1 if the response is the answer, but for white space around it."""
    expected = _required(answer, "exact_match")
    response = response.strip()
    return float(response.lower() == expected.lower() if ignore_case else response == expected)


def regex_match(
    prompt: str, response: str, answer: Any, *, pattern: str, select: str = "last", ignore_case: bool = False
) -> float:
    r"""1 if what ``pattern`` finds in the response is the answer.

    What is found is the pattern's first group, or the whole match when it has none, but for white space around
    it. ``pattern=-?\d+`` takes the last number that the response mentions.

    Args:
        select: which of several matches counts, ``first`` or ``last``.
    """
    expected = _required(answer, "regex")
    found = extract(response, pattern, select=select, ignore_case=ignore_case)
    return 0.0 if found is None else exact_match(prompt, found, expected, ignore_case=ignore_case)


def format_match(prompt: str, response: str, answer: Any, *, pattern: str) -> float:
    """1 if the whole response, but for white space around it, has the form of ``pattern``; `.` matches newlines.

    The response is seen with its special tokens, such as ``<think>`` where that is one, but without the end token.
    """
    return float(_compiled(pattern, re.DOTALL).fullmatch(response.strip()) is not None)


def reasoning_gym(
    prompt: str,
    response: str,
    answer: Any,
    *,
    metadata: dict[str, Any],
    pattern: str | None = None,
    select: str = "last",
) -> float:
    """The score of the reasoning-gym task the prompt comes from, in [0, 1]; many tasks give partial credit.

    Some tasks evaluate the response as a Python expression: each call has a process of its own, which can write
        nothing.

    Args:
        pattern: take the answer out of the response with it first, as ``regex`` does; nothing found scores 0.
    """
    missing = [name for name in ("task", "kwargs", "entry") if name not in metadata]
    if missing:
        raise ValueError(f"the row has no {', '.join(missing)}; set data.train=reasoning_gym:<task>")
    submitted = response.strip() if pattern is None else extract(response, pattern, select=select)
    if submitted is None:
        return 0.0
    dataset = _reasoning_gym_task(metadata["task"], json.dumps(metadata["kwargs"], sort_keys=True))
    try:
        return float(dataset.score_answer(submitted, metadata["entry"]))
    except Exception as error:  # many tasks' parsers raise on text that has not the form of an answer
        logger.debug("reasoning_gym %s can't read %r: %s", metadata["task"], submitted, error)
        return 0.0


def extract(response: str, pattern: str, *, select: str = "last", ignore_case: bool = False) -> str | None:
    """First group (or whole) of the first or last match of ``pattern``, stripped; None without a match."""
    if select not in ("first", "last"):
        raise ValueError(f"select={select}: must be first or last")
    matches = list(_compiled(pattern, re.IGNORECASE if ignore_case else 0).finditer(response))
    if not matches:
        return None
    match = matches[0 if select == "first" else -1]
    return (match.group(1 if match.re.groups else 0) or "").strip()


def check_texts(prompts: list[str], responses: list[str], answers: list[Any]) -> list[float]:
    """For each answer 1.0 if it is a text or number that a response can equal, else 0.0."""
    return [float(not isinstance(a, (dict, list, tuple)) and a is not None and str(a).strip() != "") for a in answers]


def _required(answer: Any, name: str) -> str:
    if answer is None:
        raise ValueError(f"{name} needs the row's answer, which is None; see data.answer_key")
    if isinstance(answer, (dict, list, tuple)):
        raise ValueError(f"{name}: the answer is a {type(answer).__name__}, {answer!r:.100}; see data.answer_key")
    if not (text := str(answer).strip()):
        raise ValueError(f"{name}: the answer is empty, which an empty response would equal")
    return text


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r}: {error}") from None


@functools.lru_cache(maxsize=64)
def _reasoning_gym_task(task: str, kwargs: str) -> Any:
    return make_reasoning_gym(task, {**json.loads(kwargs), "size": 1, "seed": 0}, origin=f"reasoning_gym:{task}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A reward function of this package.

    Attributes:
        isolated, fresh, special_tokens: as in RewardFunction; isolated ones are verifiers there.
        preload: modules that its workers share.
        own_limit: its keyword argument for a time limit of its own, which is kept below the call's.
        check: ``(prompts, responses, answers, ...) -> list``, 1.0 for each row whose answer the function can use.
    """

    function: Callable[..., Any]
    isolated: bool = True
    fresh: bool = False
    special_tokens: bool = False
    preload: tuple[str, ...] = ()
    own_limit: str | None = None
    check: Callable[..., list[float]] | None = None


BUILTIN: dict[str, Builtin] = {
    "exact_match": Builtin(function=exact_match, isolated=False, check=check_texts),
    "regex": Builtin(function=regex_match, check=check_texts),
    "format": Builtin(function=format_match, special_tokens=True),
    "math": Builtin(function=math_reward, preload=("hybridengine.rewards.math",), check=check_golds),
    "math_verify": Builtin(function=math_verify_reward, preload=("math_verify",)),
    "code": Builtin(function=code_reward, own_limit="program_seconds", check=check_tests),
    "served": Builtin(function=served, isolated=False),
    "reasoning_gym": Builtin(function=reasoning_gym, fresh=True, preload=("reasoning_gym.factory",)),
}
