"""Mathematical equivalence of final answers, exact and in bounded time.

Golds and responses go through the same reader (answers.py), which refuses what it does not understand, and values are
compared exactly or to 40 digits (equal.py). math-verify's own verdict is the reward ``math_verify``.
"""

from __future__ import annotations

import functools
from typing import Any

from hybridengine.rewards.math.answers import parse_answer
from hybridengine.rewards.math.equal import equal
from hybridengine.rewards.math.extract import final_answer
from hybridengine.rewards.math.grammar import ParseError

PERCENT = ("value", "unit")


def math_reward(prompt: str, response: str, answer: Any, *, percent: str = "value") -> float:
    r"""1 if the response's final answer equals ``answer`` mathematically (LaTeX or plain text), else 0.

    The final answer is in the last ``\boxed{..}``; for responses without one see extract.py.

    Args:
        percent: ``value``: 50% equals 1/2; ``unit``: 50% equals 50, the sign being a unit.

    Raises:
        ValueError: no ground truth, or one that can't be read.
    """
    gold = read_gold(answer, percent)
    text = final_answer(response)
    if text is None:
        return 0.0
    try:
        return float(equal(gold, parse_answer(text, percent=percent)))
    except (ParseError, RecursionError):
        return 0.0


def read_gold(answer: Any, percent: str = "value") -> object:
    """The ground truth, read.

    Raises:
        ValueError: None, a container, or text that is no answer.
    """
    if percent not in PERCENT:
        raise ValueError(f"math: percent={percent}: must be one of {' | '.join(PERCENT)}")
    if answer is None:
        raise ValueError("math needs the row's answer, which is None; see data.answer_key")
    if isinstance(answer, (dict, list, tuple)):
        raise ValueError(f"math: the answer is a {type(answer).__name__}, {answer!r:.100}; see data.answer_key")
    return _read_gold(str(answer), percent)


@functools.lru_cache(maxsize=1024)
def _read_gold(answer: str, percent: str) -> object:
    text = final_answer(answer) if "\\boxed" in answer or "\\fbox" in answer or "####" in answer else answer
    try:
        if text is None:
            raise ParseError("a box that is never closed")
        gold = parse_answer(text, percent=percent)
        if not equal(gold, parse_answer(text, percent=percent)):
            raise ParseError("it does not even equal itself")
        return gold
    except (ParseError, RecursionError) as error:
        raise ValueError(f"math: the ground truth {answer!r} can't be read as mathematics ({error})") from None


def check_golds(prompts: list[str], responses: list[str], answers: list[Any], *, percent: str = "value") -> list[float]:
    """For each answer 1.0 if it can be read as mathematics, else 0.0."""
    found = []
    for answer in answers:
        try:
            read_gold(answer, percent)
            found.append(1.0)
        except ValueError:
            found.append(0.0)
    return found
