"""Algorithms by name. A new one is one file, one line here and one YAML in conf/algorithm/; a user's own is one file
anywhere, named by ``algorithm.fn=path.py:Class``."""

from __future__ import annotations

from dataclasses import replace

from hybridengine.algorithms.base import Algorithm
from hybridengine.algorithms.cispo import CISPO
from hybridengine.algorithms.correction import preset_of
from hybridengine.algorithms.grpo import GRPO
from hybridengine.algorithms.gspo import GSPO
from hybridengine.algorithms.ppo import PPO
from hybridengine.algorithms.sapo import SAPO
from hybridengine.config import AlgorithmConfig, Config
from hybridengine.plugins import load_object

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "gspo": GSPO, "cispo": CISPO, "sapo": SAPO, "ppo": PPO}


def algorithm_class(config: AlgorithmConfig) -> type[Algorithm]:
    """The class that ``algorithm.fn``, or without it ``algorithm.name``, names.

    Raises:
        ValueError: there is none, or it is no :class:`Algorithm`.
    """
    if not config.fn:
        if config.name not in ALGORITHMS:
            raise ValueError(f"algorithm.name={config.name}: must be one of {' | '.join(ALGORITHMS)}")
        return ALGORITHMS[config.name]
    found = load_object(config.fn, "algorithm.fn")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ValueError(f"algorithm.fn={config.fn}: must be a subclass of hybridengine.algorithms.base.Algorithm")
    return found


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that the configuration names, with the correction that its schedule asks for.

    Raises:
        ValueError: see :func:`algorithm_class`; or ``algorithm.kwargs`` that it doesn't take.
    """
    section = config.algorithm
    correction = replace(section.correction, preset=preset_of(config))
    return algorithm_class(section)(replace(section, correction=correction), config.rollout)
