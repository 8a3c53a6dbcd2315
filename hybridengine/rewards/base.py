"""What a reward function is, and how its result is checked.

A reward function is any callable of the form::

    def reward(prompt: str, response: str, answer, *, metadata: dict, **kwargs) -> float: ...

``prompt`` is the prompt as the user wrote it, ``response`` the decoded response without special tokens,
``answer`` the row's ground truth (None when the data has none), ``metadata`` every other column of the row.
``kwargs`` are the keyword arguments from the configuration. A function that names them, or takes ``**kwargs``,
also receives ``truncated`` (the response was cut at the token limit) and ``token_ids`` (the response's tokens);
``metadata``, too, may be left out. It is called from several threads at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from hybridengine.types import Trajectory

OFFERED = ("metadata", "truncated", "token_ids")


class RewardError(RuntimeError):
    """A reward function failed; the message names it and the prompt, the cause is its own exception."""


class RewardFunction:
    """A reward function with its name, weight and keyword arguments, checked when it is made.

    Args:
        name: as it appears in the metrics and in error messages.
        function: the callable, see the module's docstring.
        weight: factor in the total reward.
        kwargs: keyword arguments from the configuration.
        limits_itself: the function keeps to the time limit on its own.

    Raises:
        ValueError: the callable can't be called that way.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        weight: float = 1.0,
        kwargs: dict[str, Any],
        limits_itself: bool = False,
    ) -> None:
        if not math.isfinite(weight):
            raise ValueError(f"reward {name}: weight={weight} must be a finite number")
        self.name = name
        self.weight = weight
        self.limits_itself = limits_itself
        self._function = function
        self._kwargs = dict(kwargs)
        self._offered = self._check_signature()

    def _check_signature(self) -> tuple[str, ...]:
        signature = inspect.signature(self._function)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        taken = tuple(name for name in OFFERED if takes_any or name in signature.parameters)
        if clash := sorted(set(OFFERED) & set(self._kwargs)):
            raise ValueError(f"reward {self.name}: kwargs can't set {', '.join(clash)}, the trainer passes it")
        try:
            signature.bind("prompt", "response", "answer", **dict.fromkeys(taken), **self._kwargs)
        except TypeError as error:
            raise ValueError(
                f"reward {self.name}: {getattr(self._function, '__name__', 'function')}{signature} can't be called as "
                f"(prompt, response, answer, *, metadata{''.join(f', {name}' for name in self._kwargs)}): {error}"
            ) from None
        return taken

    def __call__(self, trajectory: Trajectory, response: str) -> float:
        """The unweighted reward of one trajectory.

        Raises:
            RewardError: the function raised, or returned something that is not a finite number.
        """
        prompt = trajectory.prompt
        extras = {
            "metadata": prompt.metadata,
            "truncated": trajectory.truncated,
            "token_ids": trajectory.token_ids,
        }
        where = f"reward {self.name} on prompt {prompt.index}, sample {trajectory.sample_index}"
        try:
            value = self._function(
                prompt.text, response, prompt.answer, **{name: extras[name] for name in self._offered}, **self._kwargs
            )
        except Exception as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        return as_reward(value, where)


def as_reward(value: Any, where: str) -> float:
    """A bool, int, float, or array or tensor of one element, as a float.

    Raises:
        RewardError: anything else, NaN and infinities included.
    """
    number = value
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (ValueError, RuntimeError):
            pass
    if not isinstance(number, (bool, int, float)) or not math.isfinite(number):
        raise RewardError(f"{where}: returned {value!r}, expected a finite number")
    return float(number)
