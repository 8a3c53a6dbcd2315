"""How a reward function wants to be called, told from its parameters' names, and what it may return.

=========== ======================================================== ==========================================
form        told by                                                  called as
=========== ======================================================== ==========================================
sample      anything else                                            (prompt, response, answer, *, metadata, ...)
batch       ``responses``, or ``batch=true`` in the configuration    (prompts, responses, answers, *, metadata, ...)
verl        ``solution_str``                                         (data_source, solution_str, ground_truth,
                                                                     extra_info)
verl_batch  ``solution_strs``                                        the same names in the plural, lists
trl         ``completions``                                          (prompts, completions, completion_ids and every
                                                                     column of the data, lists)
=========== ======================================================== ==========================================

Any of them may be ``async def``. The forms of verl 0.9 and TRL 1.16, which pass everything by name.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SAMPLE, BATCH, VERL, VERL_BATCH, TRL = "sample", "batch", "verl", "verl_batch", "trl"
#: Forms that take lists.
BATCHED = (BATCH, VERL_BATCH, TRL)
#: What the forms ``sample`` and ``batch`` pass by name to a function that names it or takes ``**kwargs``.
OFFERED = ("metadata", "truncated", "token_ids")


class ResultError(ValueError):
    """A reward function returned something that is no reward."""


class TimeLimitError(RuntimeError):
    """A verifier of this package gave up at a time limit of its own; the sample scores ``score``."""

    def __init__(self, message: str, score: float = 0.0) -> None:
        super().__init__(message)
        self.score = score


@dataclass(slots=True, kw_only=True)
class Call:
    """What there is to know about one sample.

    Attributes:
        answer_key: the data's name of the column with the answer; TRL's functions get it under that name.
        messages: the prompt as chat messages where the data has it so; ``prompt`` is then the last one's text.
    """

    prompt: str
    response: str
    answer: Any = None
    answer_key: str = "answer"
    metadata: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    token_ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class Value:
    """What a function returned for one sample: a score (None: it has none to give), and numbers beside it."""

    score: float | None
    extras: dict[str, float] = field(default_factory=dict)


# -- recognition -------------------------------------------------------------------------------------------------------


def recognise(function: Callable[..., Any], *, batch: bool | None = None) -> str:
    """The form of a function's signature.

    Args:
        batch: from the configuration; None: told by the parameters' names.

    Raises:
        ValueError: ``batch`` contradicts the names.
    """
    names = parameters(function)
    if "solution_str" in names:
        form = VERL
    elif "solution_strs" in names:
        form = VERL_BATCH
    elif "completions" in names:
        form = TRL
    elif "responses" in names or batch:
        form = BATCH
    else:
        form = SAMPLE
    if batch is not None and batch != (form in BATCHED):
        raise ValueError(f"batch={str(batch).lower()}, but the parameters {sorted(names)} are those of form {form!r}")
    return form


def parameters(function: Callable[..., Any]) -> set[str]:
    """Names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_signature(function: Callable[..., Any], form: str, kwargs: dict[str, Any]) -> None:
    """Raises ValueError when ``function`` can't be called in ``form`` with ``kwargs``."""
    signature = inspect.signature(function)
    given = OFFERED if form in (SAMPLE, BATCH) else tuple(_named(form, [_NOTHING]))
    if clash := sorted(set(given) & set(kwargs)):
        raise ValueError(f"kwargs can't set {', '.join(clash)}, the trainer passes it")
    try:
        if form in (SAMPLE, BATCH):
            signature.bind("prompt", "response", "answer", **dict.fromkeys(_taken(function, OFFERED)), **kwargs)
        elif form == TRL:  # which columns there are is known once the data is
            signature.bind_partial(**_accepted(function, _named(form, [_NOTHING])), **kwargs)
        else:
            signature.bind(**_accepted(function, _named(form, [_NOTHING])), **kwargs)
    except TypeError as error:
        expected = "prompt, response, answer, *, metadata" if form == SAMPLE else ", ".join(given)
        if form == BATCH:
            expected = "prompts, responses, answers, *, metadata"
        raise ValueError(
            f"{getattr(function, '__name__', 'function')}{signature} can't be called as "
            f"({expected}{''.join(f', {name}' for name in kwargs)}): {error}"
        ) from None


def check_columns(function: Callable[..., Any], form: str, kwargs: dict[str, Any], first: Call) -> None:
    """Raises ValueError when a TRL function needs a column that the data (``first`` row) does not have."""
    if form != TRL:
        return
    columns = _named(form, [first])
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in columns
        and name not in kwargs
    ]
    if required:
        raise ValueError(f"it needs the column {', '.join(required)}; the data has {', '.join(sorted(columns))}")


# -- the call ----------------------------------------------------------------------------------------------------------


def call(function: Callable[..., Any], form: str, calls: Sequence[Call], kwargs: dict[str, Any]) -> list[Value]:
    """One value per sample, in order. Coroutines are run to their end here.

    Raises:
        ResultError: the function returned something else.
        what the function raised.
    """
    if not calls:
        return []
    result = invoke(function, form, calls, kwargs)
    if inspect.isawaitable(result):
        result = asyncio.run(_finish(result))
    return values_of(result, form, len(calls))


def invoke(function: Callable[..., Any], form: str, calls: Sequence[Call], kwargs: dict[str, Any]) -> Any:
    """What ``function`` returns; a coroutine where it is async. Forms that take one sample need one call."""
    if form == SAMPLE:
        (one,) = calls
        offered = {name: getattr(one, name) for name in _taken(function, OFFERED)}
        return function(one.prompt, one.response, one.answer, **offered, **kwargs)
    if form == BATCH:
        offered = {name: [getattr(one, name) for one in calls] for name in _taken(function, OFFERED)}
        lists = [[getattr(one, name) for one in calls] for name in ("prompt", "response", "answer")]
        return function(*lists, **offered, **kwargs)
    return function(**_accepted(function, _named(form, calls)), **kwargs)


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _named(form: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Arguments by name, as verl's reward managers and TRL's trainer pass them."""
    if form == VERL:
        (one,) = calls
        return {
            "data_source": one.metadata.get("data_source"),
            "solution_str": one.response,
            "ground_truth": _ground_truth(one),
            "extra_info": one.metadata.get("extra_info") or {},
        }
    if form == VERL_BATCH:
        singles = [_named(VERL, [one]) for one in calls]
        names = {"data_sources": "data_source", "solution_strs": "solution_str"}
        names |= {"ground_truths": "ground_truth", "extra_infos": "extra_info"}
        return {plural: [single[name] for single in singles] for plural, name in names.items()}
    columns = {name: [one.metadata.get(name) for one in calls] for name in calls[0].metadata}
    answers = [one.answer for one in calls]
    return columns | {
        "answer": answers,
        calls[0].answer_key.rsplit(".", 1)[-1]: answers,
        "prompts": [one.prompt if one.messages is None else one.messages for one in calls],
        "completions": [
            one.response if one.messages is None else [{"role": "assistant", "content": one.response}] for one in calls
        ],
        "completion_ids": [one.token_ids for one in calls],
    }


def _ground_truth(one: Call) -> Any:
    """The answer; where the data set has verl's columns and no other was named, what stands in them."""
    if one.answer is None and isinstance(reward_model := one.metadata.get("reward_model"), dict):
        return reward_model.get("ground_truth")
    return one.answer


#: Of functions called so far, by id: the function, which keeps its id from being another's; the names of its
#: parameters; and whether it takes any name. Read once, since a signature costs as much as a call of a short function.
_PARAMETERS: dict[int, tuple[Callable[..., Any], frozenset[str], bool]] = {}


def _taken(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    if id(function) not in _PARAMETERS:
        known = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        _PARAMETERS[id(function)] = function, frozenset(known), takes_any
    _, own, takes_any = _PARAMETERS[id(function)]
    return [name for name in names if takes_any or name in own]


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _taken(function, list(arguments))}


_NOTHING = Call(prompt="", response="")


# -- results -----------------------------------------------------------------------------------------------------------


def values_of(result: Any, form: str, count: int) -> list[Value]:
    """What a function of ``form`` returned for ``count`` samples.

    Raises:
        ResultError: not one number (or dict with a ``score``) per sample.
    """
    if form not in BATCHED:
        return [value_of(result, form)]
    found = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(found, (list, tuple)) or len(found) != count:
        size = f"{len(found)} values" if isinstance(found, (list, tuple)) else repr(found)[:200]
        raise ResultError(f"returned {size}, expected a list of {count}, one per sample")
    return [value_of(item, form) for item in found]


def value_of(result: Any, form: str) -> Value:
    """One sample's value: a number, verl's dict with a ``score``, or from TRL's functions None.

    >>> value_of({"score": 0.5, "acc": True, "pred": "x"}, VERL)
    Value(score=0.5, extras={'acc': 1.0})
    """
    if result is None and form == TRL:
        return Value(None)
    if isinstance(result, dict) and form in (VERL, VERL_BATCH):
        if "score" not in result:
            raise ResultError(f"returned a dict without 'score': {result!r:.200}")
        extras = {str(k): float(v) for k, v in result.items() if k != "score" and isinstance(v, (bool, int, float))}
        return Value(as_number(result["score"]), {name: v for name, v in extras.items() if math.isfinite(v)})
    return Value(as_number(result))


def as_number(value: Any) -> float:
    """A bool, int, float, or array or tensor of one element, as a float.

    Raises:
        ResultError: anything else, NaN and infinities included.
    """
    number = value
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (ValueError, RuntimeError):
            pass
    if not isinstance(number, (bool, int, float)) or not math.isfinite(number):
        raise ResultError(f"returned {value!r:.200}, expected a finite number")
    return float(number)
