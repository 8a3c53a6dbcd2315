"""Look-ups in the schema and the YAML groups: keys, sections, free-form dictionaries, options of groups."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import TERMS, Config, walk


class ConfigError(ValueError):
    """A configuration that can't be run; the message names the key, the value and what would be right."""


def conf_dir() -> Path:
    """The YAML groups: beside the package when installed, at the repository's top level in a clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def config_groups(config_dirs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Group name -> its options, from the YAML files of this package and of ``config_dirs``."""
    groups: dict[str, list[str]] = {}
    for directory in (conf_dir(), *config_dirs):
        for path in sorted(directory.glob("*/*.yaml")):
            options = groups.setdefault(path.parent.name, [])
            if path.stem not in options:
                options.append(path.stem)
    return groups


def group_file(group: str, option: str, config_dirs: Sequence[Path] = ()) -> Path | None:
    """The YAML file of a group's option; the user's directories first."""
    files = [directory / group / f"{option}.yaml" for directory in (*config_dirs, conf_dir())]
    return next((file for file in files if file.is_file()), None)


def is_dictionary(path: str) -> bool:
    """Whether ``path`` is a key whose value is a dictionary that the user fills."""
    return any(path == name and "dict" in str(item.type) for name, item in walk())


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every key in nested sections; a dictionary that the user fills is one value.

    >>> list(leaves({"rollout": {"tp": 2}, "seed": 1}))
    [('rollout.tp', 2), ('seed', 1)]
    """
    for name, value in node.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and not is_dictionary(path):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def is_free_form(path: str) -> bool:
    """Whether ``path`` lies inside a dictionary whose keys the user chooses."""
    for name, item in walk():
        if "dict" in str(item.type) and path.startswith(f"{name}."):
            if name in TERMS:
                parts = path.removeprefix(f"{name}.").split(".")
                return len(parts) == 1 or parts[1] in {item.name for item in fields(TERMS[name])}
            return True
    return False


@functools.cache
def sections(schema: type = Config, prefix: str = "") -> frozenset[str]:
    """Paths that have keys below them, such as "rollout" and "rollout.validation"."""
    found: set[str] = set()
    for name, hint in typing.get_type_hints(schema).items():
        if is_dataclass(hint) and isinstance(hint, type):
            found |= {f"{prefix}{name}"} | sections(hint, f"{prefix}{name}.")
    return frozenset(found)


def is_known(path: str) -> bool:
    """Whether the schema has ``path``, as a key, a section, or an entry of a dictionary that the user fills."""
    return path in dict(walk()) or path in sections() or is_free_form(path)
