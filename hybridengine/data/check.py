"""Check before a run that every row has a prompt, and a usable answer where a reward needs one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hybridengine.config import DataConfig, RewardConfig
from hybridengine.data.rows import ABSENT, ANSWER_NAMES, PROMPT_NAMES, Row, columns_of, suggestion

#: Built-in rewards that compare the response with the row's answer.
COMPARING = ("exact_match", "regex", "math", "math_verify")


def answer_needed_for(reward: RewardConfig) -> str | None:
    """The first configured reward that needs the rows' answers, as it is written in the configuration.

    Functions of the user's own may do without.
    """
    if reward.fn in COMPARING:
        return f"reward.fn={reward.fn}"
    return next((f"reward.terms.{name}.fn={t.fn}" for name, t in reward.terms.items() if t.fn in COMPARING), None)


def check_rows(
    rows: Sequence[Row], config: DataConfig, origin: str, *, answer_for: str | None, notes: list[str]
) -> None:
    """Refuse rows without a prompt or with a useless answer.

    Args:
        origin: the key and file they come from, for messages.
        answer_for: see :func:`hybridengine.data.prompts.load_prompts`.
        notes: gets a sentence when there are no answers and none is needed.

    Raises:
        ValueError: naming the row, the key and what would be right.
    """
    for row in rows:
        if (value := row.get(config.prompt_key)) is ABSENT or value is None:
            raise ValueError(_missing(row.where, "prompt_key", config.prompt_key, rows, PROMPT_NAMES, value))
    answers = [row.get(config.answer_key) for row in rows]
    if rows and all(answer is ABSENT for answer in answers):
        text = _missing(origin, "answer_key", config.answer_key, rows, ANSWER_NAMES, ABSENT)
        if answer_for is not None:
            raise ValueError(f"{text}; {answer_for} compares with it")
        if config.answer_key != DataConfig.answer_key:
            raise ValueError(text)
        notes.append(f"{text}; reward functions get answer=None")
        return
    if _is_generated(rows):
        return  # reasoning-gym's scorers look at the whole entry; some have no single answer
    for row, answer in zip(rows, answers, strict=True):
        if problem := _useless(answer, config.answer_key):
            raise ValueError(f"{row.where}: column {config.answer_key!r} (data.answer_key) {problem}")


def _missing(where: str, option: str, key: str, rows: Sequence[Row], usual: Sequence[str], value: Any) -> str:
    columns = columns_of(rows)
    what = f"column {key!r} (data.{option}) is null" if value is None else f"no column {key!r} (data.{option})"
    instead = suggestion([path for path in columns if path != key], usual)
    did_you_mean = f"; did you mean data.{option}={instead}?" if instead and value is not None else ""
    return f"{where}: {what}; available: {', '.join(columns)}{did_you_mean}"


def _is_generated(rows: Sequence[Row]) -> bool:
    return bool(rows) and {"task", "kwargs", "entry"} <= rows[0].columns.keys()


def _useless(answer: Any, key: str) -> str | None:
    if answer is ABSENT:
        return "is missing, and other rows have it"
    if answer is None:
        return "is null, and nothing can be compared with it; remove the row or give it an answer"
    if isinstance(answer, dict):
        return f"is an object; name one of its values: data.answer_key={' | '.join(f'{key}.{name}' for name in answer)}"
    if isinstance(answer, (str, list)) and not (answer.strip() if isinstance(answer, str) else answer):
        return "is empty, so an empty response would be right; remove the row or give it an answer"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"is {answer}, no number that a response can equal; remove the row or give it an answer"
    return None
