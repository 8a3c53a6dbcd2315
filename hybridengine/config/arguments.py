"""The arguments of ``hybridengine.train``: overrides, configuration files and directories, and what only shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridengine.config.file import file_overrides
from hybridengine.config.schema import ConfigError

#: Hydra's own flags that show something and run nothing; those in the second line take a value.
SHOW = {"--info", "-i", "--hydra-help", "--resolve"}
SHOW_WITH_VALUE = {"--cfg", "-c", "--package", "-p"}


@dataclass(slots=True)
class Arguments:
    """The parsed command line.

    Attributes:
        overrides: ``key=value``, those of configuration files first.
        config_dirs: directories with groups of the user's own.
        show: flags of Hydra that show the configuration; empty for a run.
    """

    overrides: list[str]
    config_dirs: list[Path] = field(default_factory=list)
    show: list[str] = field(default_factory=list)


def read_arguments(given: Sequence[str]) -> Arguments:
    """Split a command line.

    Raises:
        ConfigError: an unknown option, a file that can't be read, or unknown keys in it.
    """
    left, overrides, show = list(given), list[str](), list[str]()
    files, config_dirs = list[Path](), list[Path]()
    while left:
        name, equals, value = (left[0] if left[0].startswith("-") else "").partition("=")
        if not name:
            overrides.append(left.pop(0))
            continue
        whole = left.pop(0)
        if name in ("--config", "--config-dir", "-cd"):
            path = Path(value if equals else _value(name, left)).expanduser()
            _check_path(name, path)
            (files if name == "--config" else config_dirs).append(path)
        elif name in SHOW_WITH_VALUE:
            show += [whole] if equals else [whole, _value(name, left)]
        elif name in SHOW:
            show.append(whole)
        else:
            raise ConfigError(_unknown(whole, left))
    return Arguments([*file_overrides(files, overrides, config_dirs), *overrides], config_dirs, show)


def _value(name: str, left: list[str]) -> str:
    if not left or left[0].startswith("-"):
        raise ConfigError(f"{name}: needs a value after it")
    return left.pop(0)


def _check_path(name: str, path: Path) -> None:
    if name == "--config" and not path.is_file():
        raise ConfigError(f"{name} {path}: no such file; give a YAML file of keys, or a run's config.json")
    if name != "--config" and not path.is_dir():
        raise ConfigError(f"{name} {path}: no such directory; give one with files such as experiment/NAME.yaml")


def _unknown(option: str, left: Sequence[str]) -> str:
    """For an option as other programs have it: ``--learning_rate 1e-6``."""
    from hybridengine.config import walk
    from hybridengine.config.schema import is_known
    from hybridengine.config.suggest import unknown_key

    name, equals, value = option.lstrip("-").partition("=")
    value = value if equals else left[0] if left and not left[0].startswith("-") else "VALUE"
    if is_known(name):
        return f"{option}: keys are written without dashes: {name}={value}"
    found = unknown_key(name.replace("-", "_"), [leaf for leaf, _ in walk()])
    return f"{option}: keys are written key=value, without dashes; {found}"
