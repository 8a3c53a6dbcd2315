"""From the name of a reward in the configuration to the callable."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridengine.config import RewardConfig, RewardTerm
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
    source, colon, attribute = spec.rpartition(":")
    if not colon or not source or not attribute:
        raise ValueError(f"reward {spec!r}: no such reward; give {FORMS}")
    module = _import_file(Path(source).expanduser(), spec) if source.endswith(".py") else _import_module(source, spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(
            f"reward {spec!r}: {source} has no function {attribute!r}; it has {', '.join(names) or 'none'}"
        )
    return function


def _import_file(path: Path, spec: str) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: no such file {path}")
    name = f"hybridengine_reward_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look modules up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"reward {spec!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str, spec: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"reward {spec!r}: importing {name} failed: {type(error).__name__}: {error}") from error
