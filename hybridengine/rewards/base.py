"""A configured reward function: what it is called with, what becomes of its errors.

The common form is::

    def reward(prompt: str, response: str, answer, *, metadata: dict, **kwargs) -> float: ...

``prompt`` is the prompt as the user wrote it (of chat messages the last one's text), ``response`` the decoded response,
``answer`` the row's ground truth (None when the data has none), ``metadata`` every other column of the row. ``kwargs``
are the keyword arguments from the configuration. A function that names them, or takes ``**kwargs``, also receives
``truncated`` (the response was cut at the token limit) and ``token_ids`` (the response's tokens); ``metadata``, too,
may be left out. Functions that take lists, and those written for verl and TRL, are recognised: signatures.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hybridengine.rewards import signatures
from hybridengine.rewards.signatures import Call, ResultError, Value
from hybridengine.types import Trajectory

#: ``on_error``: what an error of a reward function costs.
AUTO, RAISE, ZERO = "auto", "raise", "zero"
ON_ERROR = (AUTO, RAISE, ZERO)


class RewardError(RuntimeError):
    """A reward function failed; the message names it and the prompt, the cause is its own exception."""


class RewardFunction:
    """A reward function with its name, weight and keyword arguments, checked when it is made.

    Args:
        name: as it appears in the metrics and in error messages.
        function: the callable.
        fn: how workers find it, see load.py; needed when ``isolated``.
        weight: factor in the total reward.
        kwargs: keyword arguments from the configuration.
        batch: whether it takes lists; None: told by its parameters' names.
        isolated: it runs in a worker process.
        fresh: each call gets a process of its own, since it may run code that the model wrote, which could change how
            later samples are scored.
        verifier: it reads text that a model wrote and comes with this package: where it takes too long, dies, needs too
            much memory or fails in another way than by a ValueError, that is the text's doing, and scores 0 whatever
            ``on_error`` says.
        on_error: ``raise`` ends the run, ``zero`` scores 0; ``auto`` raises what the function raised, and scores 0
            where an isolated function took too long or its process died.
        timeout_seconds: of one call.
        special_tokens: the response keeps them in its text (but not the end token).
        share: of the samples that it sees; below 1 only for what is never trained on.

    Raises:
        ValueError: the callable can't be called that way.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        kwargs: dict[str, Any],
        fn: str = "",
        weight: float = 1.0,
        batch: bool | None = None,
        isolated: bool = False,
        fresh: bool = False,
        verifier: bool = False,
        on_error: str = AUTO,
        timeout_seconds: float = 10.0,
        special_tokens: bool = False,
        share: float = 1.0,
    ) -> None:
        if not math.isfinite(weight):
            raise ValueError(f"reward {name}: weight={weight} must be a finite number")
        if on_error not in ON_ERROR:
            raise ValueError(f"reward {name}: on_error={on_error}: must be one of {' | '.join(ON_ERROR)}")
        if not timeout_seconds > 0:
            raise ValueError(f"reward {name}: timeout_seconds={timeout_seconds}: must be greater than 0")
        if not 0 < share <= 1:
            raise ValueError(f"reward {name}: share={share}: must be in (0, 1]")
        self.name, self.function, self.fn, self.weight, self.share = name, function, fn, weight, share
        self.kwargs = dict(kwargs)
        self.isolated, self.fresh, self.verifier = isolated, fresh, verifier
        self.on_error, self.timeout_seconds, self.special_tokens = on_error, timeout_seconds, special_tokens
        try:
            self.form = signatures.recognise(function, batch=batch)
            signatures.check_signature(function, self.form, self.kwargs)
        except ValueError as error:
            raise ValueError(f"reward {name}: {error}") from None
        self.runs_on_loop = signatures.is_async(function) and not isolated

    @property
    def takes_lists(self) -> bool:
        return self.form in signatures.BATCHED

    def check_columns(self, first: Call) -> None:
        """Raises ValueError when it needs a column that the data's ``first`` row does not have."""
        try:
            signatures.check_columns(self.function, self.form, self.kwargs, first)
        except ValueError as error:
            raise ValueError(f"reward {self.name}: {error}") from None

    def score(self, calls: list[Call]) -> list[Value]:
        """Call it here, in this process.

        Raises:
            ResultError: it returned something that is no reward.
            what the function raised.
        """
        return signatures.call(self.function, self.form, calls, self.kwargs)

    def __call__(self, trajectory: Trajectory, response: str) -> float:
        """The unweighted reward of one trajectory, here and now; 0.0 where the function has none to give.

        Raises:
            RewardError: the function raised, or returned something that is not a finite number.
        """
        where = f"reward {self.name} on {describe(trajectory)}"
        try:
            (value,) = self.score([call_of(trajectory, response)])
        except ResultError as error:
            raise RewardError(f"{where}: {error}") from error
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        return value.score or 0.0


def call_of(trajectory: Trajectory, response: str, *, answer_key: str = "answer") -> Call:
    """What is known about a trajectory, in the form that reward functions are given."""
    prompt = trajectory.prompt
    return Call(
        prompt=prompt.text,
        response=response,
        answer=prompt.answer,
        answer_key=answer_key,
        metadata=prompt.metadata,
        truncated=trajectory.truncated,
        token_ids=trajectory.token_ids,
        messages=prompt.messages,
    )


def describe(trajectory: Trajectory) -> str:
    """Which sample it is, for messages."""
    return f"prompt {trajectory.prompt.index}, sample {trajectory.sample_index}"
