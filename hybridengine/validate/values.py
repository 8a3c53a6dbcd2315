"""Single values of the configuration, against the limits that stand beside their keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybridengine.config import AuditTerm, Config, RewardTerm, limits_of, walk


def value_of(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node


def check_values(config: Config) -> Iterator[str]:
    """Values that the limits beside their keys don't allow."""
    for path, item in walk():
        yield from _problem(path, value_of(config, path), item)
    for section, schema in (("terms", RewardTerm), ("audit", AuditTerm)):
        for name, term in getattr(config.reward, section).items():
            for item in dataclasses.fields(schema):
                yield from _problem(f"reward.{section}.{name}.{item.name}", getattr(term, item.name), item)


def _problem(path: str, value: Any, item: dataclasses.Field[Any]) -> Iterator[str]:
    if problem := limits_of(item).problem(value):
        yield f"{path}={value}: {problem}" + (", or null" if "None" in str(item.type) else "")
