"""From the name of a reward in the configuration to the callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hybridengine.config import AuditTerm, RewardConfig, RewardTerm
from hybridengine.plugins import load_object
from hybridengine.rewards.base import RewardFunction
from hybridengine.rewards.builtin import BUILTIN

FORMS = f"{' | '.join(BUILTIN)} | path.py:function | package.module:function"
#: ``math.check`` and the like: what a worker is asked to hold answers against.
CHECK = ".check"
#: A verifier's own time limit as a share of the call's, after which its process would be killed.
OWN_SHARE = 0.9


def load_rewards(config: RewardConfig) -> list[RewardFunction]:
    """The configured reward functions; ``reward.fn`` first, then ``reward.terms`` in their order.

    Raises:
        ValueError: none configured, nor a reward model, or one that can't be found, imported or called.
    """
    rewards = []
    if config.fn:
        rewards.append(_reward(_name(config.fn), RewardTerm(fn=config.fn, kwargs=config.kwargs), config))
    elif config.kwargs:
        raise ValueError(f"reward.kwargs={config.kwargs} without reward.fn; terms have kwargs of their own")
    for name, term in config.terms.items():
        if rewards and name == rewards[0].name and config.fn:
            raise ValueError(f"reward.terms.{name}: reward.fn has the same name; rename the term")
        rewards.append(_reward(name, term, config))
    if not rewards and config.model.path is None:
        raise ValueError(f"no reward configured: set reward.fn to {FORMS}, or several under reward.terms")
    return rewards


def reward_names(config: RewardConfig) -> list[str]:
    """Names of everything that scores, in the order of Scorer's, without loading it."""
    first = [_name(config.fn)] if config.fn else []
    return [*first, *config.terms, *(f"audit/{name}" for name in config.audit)]


def _name(fn: str) -> str:
    return fn.rsplit(":", 1)[-1]


def load_audits(config: RewardConfig) -> list[RewardFunction]:
    """The functions under ``reward.audit``, named ``audit/<name>``; their weight is 0.

    Raises:
        ValueError: as for :func:`load_rewards`.
    """
    found = []
    for name, audit in config.audit.items():
        assert isinstance(audit, AuditTerm)
        term = RewardTerm(fn=audit.fn, kwargs=audit.kwargs, weight=0.0, isolate=audit.isolate)
        found.append(_reward(f"audit/{name}", term, config, share=audit.share))
    return found


def _reward(name: str, term: RewardTerm, config: RewardConfig, *, share: float = 1.0) -> RewardFunction:
    builtin = BUILTIN.get(term.fn)
    isolate = config.isolate if term.isolate is None else term.isolate
    if builtin is not None and builtin.isolated and isolate is False and term.isolate is not None:
        raise ValueError(
            f"reward.terms.{name}.isolate=false: {term.fn} reads what a model wrote, in a process of its own"
        )
    timeout_seconds, kwargs = term.timeout_seconds or config.timeout_seconds, dict(term.kwargs)
    if builtin is not None and builtin.own_limit is not None:
        kwargs.setdefault(builtin.own_limit, OWN_SHARE * timeout_seconds)
    return RewardFunction(
        name,
        load_function(term.fn),
        fn=term.fn,
        weight=term.weight,
        kwargs=kwargs,
        batch=term.batch,
        isolated=isolate if builtin is None else builtin.isolated,
        fresh=builtin is not None and builtin.fresh,
        verifier=builtin is not None and builtin.isolated,
        on_error=term.on_error or config.on_error,
        timeout_seconds=timeout_seconds,
        special_tokens=builtin is not None and builtin.special_tokens,
        share=share,
    )


def preloaded(rewards: Iterable[RewardFunction]) -> list[str]:
    """Modules that the workers of these functions share."""
    return [module for reward in rewards if reward.fn in BUILTIN for module in BUILTIN[reward.fn].preload]


def load_function(spec: str) -> Callable[..., Any]:
    """The callable that ``spec`` names: a built-in, ``path.py:function`` or ``package.module:function``.

    Raises:
        ValueError: it does not exist or its file can't be imported.
    """
    if spec in BUILTIN:
        return BUILTIN[spec].function
    if spec.endswith(CHECK) and (builtin := BUILTIN.get(spec.removesuffix(CHECK))) is not None and builtin.check:
        return builtin.check
    if ":" not in spec:
        raise ValueError(f"reward {spec!r}: no such reward; give {FORMS}")
    function = load_object(spec, "reward")
    if not callable(function):
        raise ValueError(f"reward={spec}: is no function but a {type(function).__name__}")
    return function
