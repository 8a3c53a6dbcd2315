"""From the name of a reward in the configuration to the callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridengine.config import RewardConfig, RewardTerm
from hybridengine.plugins import load_object
from hybridengine.rewards.base import RewardFunction
from hybridengine.rewards.builtin import BUILTIN
from hybridengine.rewards.math import math_reward, verifier

FORMS = f"{' | '.join(BUILTIN)} | path.py:function | package.module:function"


def load_rewards(config: RewardConfig) -> list[RewardFunction]:
    """The configured reward functions; ``reward.fn`` first, then ``reward.terms`` in their order.

    Raises:
        ValueError: none configured, or one that can't be found, imported or called.
    """
    rewards = []
    if config.fn:
        name = config.fn.rsplit(":", 1)[-1]
        rewards.append(_reward(name, RewardTerm(fn=config.fn, kwargs=config.kwargs), config))
    elif config.kwargs:
        raise ValueError(f"reward.kwargs={config.kwargs} without reward.fn; terms have kwargs of their own")
    for name, term in config.terms.items():
        if rewards and name == rewards[0].name and config.fn:
            raise ValueError(f"reward.terms.{name}: reward.fn has the same name; rename the term")
        rewards.append(_reward(name, term, config))
    if not rewards:
        raise ValueError(f"no reward configured: set reward.fn to {FORMS}, or several under reward.terms")
    return rewards


def _reward(name: str, term: RewardTerm, config: RewardConfig) -> RewardFunction:
    function, kwargs = load_function(term.fn), dict(term.kwargs)
    limits_itself = function is math_reward
    if limits_itself:
        kwargs.setdefault("limit_seconds", config.timeout_seconds)
        verifier.warm_up()
    return RewardFunction(name, function, weight=term.weight, kwargs=kwargs, limits_itself=limits_itself)


def load_function(spec: str) -> Callable[..., Any]:
    """The callable that ``spec`` names: a built-in, ``path.py:function`` or ``package.module:function``.

    Raises:
        ValueError: it does not exist or its file can't be imported.
    """
    if spec in BUILTIN:
        return BUILTIN[spec]
    if ":" not in spec:
        raise ValueError(f"reward {spec!r}: no such reward; give {FORMS}")
    return load_object(spec, "reward")
