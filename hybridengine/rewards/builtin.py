"""Reward functions that come with the package, and the names they are configured by."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from hybridengine.data.sources import make_reasoning_gym
from hybridengine.rewards.math import math_reward

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
    found = extract(response, pattern, select=select, ignore_case=ignore_case)
    return 0.0 if found is None else exact_match(prompt, found, answer, ignore_case=ignore_case)


def format_match(prompt: str, response: str, answer: Any, *, pattern: str) -> float:
    """1 if the whole response, but for white space around it, has the form of ``pattern``; `.` matches newlines."""
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


def _required(answer: Any, name: str) -> str:
    if answer is None:
        raise ValueError(f"{name} needs the row's answer, which is None; see data.answer_key")
    return str(answer).strip()


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)


@functools.lru_cache(maxsize=64)
def _reasoning_gym_task(task: str, kwargs: str) -> Any:
    return make_reasoning_gym(task, {**json.loads(kwargs), "size": 1, "seed": 0}, origin=f"reasoning_gym:{task}")


BUILTIN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "regex": regex_match,
    "format": format_match,
    "math": math_reward,
    "reasoning_gym": reasoning_gym,
}
