"""``--config run.yaml``: a file of keys, or the config.json of an earlier run, as overrides that come before others.

model: {path: /models/Qwen2.5-7B}
train: fsdp_bf16              # the name of a group's option, or
rollout: {engine: vllm, tp: 2}    # keys of the group
data.train: train.jsonl       # dotted paths work, too
experiment: qwen2_5_7b
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.config.overrides import check_key, check_overrides, quoted
from hybridengine.config.schema import ConfigError, config_groups, group_file, is_known, leaves


def file_overrides(files: Sequence[Path], command_line: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """The overrides of configuration files, later files after earlier ones, to be put before those of the command line.

    A group's option that the command line names replaces the files', and the keys that it sets come after theirs.

    Raises:
        ConfigError: a file that can't be read, or unknown keys in it, naming the file.
    """
    if not files:
        return []
    groups = config_groups(config_dirs)
    chosen = {name: value for name, _, value in (text.lstrip("+").partition("=") for text in command_line)}
    if (experiment := chosen.get("experiment")) is not None:
        raise ConfigError(f"experiment={experiment}: with --config it goes into the file, as experiment: {experiment}")
    options: dict[str, str] = {}
    keys: list[str] = []
    for file in files:
        for name, value in leaves(_read(file)):
            if name in groups:
                options[name] = value
            else:
                keys.append(f"++{name}={quoted(value)}")
        _check(file, [*options.items()], keys, config_dirs)
    selected = [f"{_plus(name)}{name}={option}" for name, option in options.items() if name not in chosen]
    for name, option in chosen.items():
        if name in groups and "." not in name:
            keys += _option_keys(name, option, config_dirs)
    return selected + keys


def overrides_of(content: Mapping[str, Any]) -> list[str]:
    """A configuration as overrides, every key of it; keys that the schema no longer has are left out."""
    return [f"++{path}={quoted(value)}" for path, value in leaves(content) if is_known(path)]


def _plus(group: str) -> str:
    return "+" if group == "experiment" else ""


def _read(file: Path) -> Mapping[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        if file.suffix == ".json":
            content = json.loads(file.read_text())
        else:
            content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config {file}: can't be read ({error})") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {file}: holds a {type(content).__name__}, expected keys and values")
    if "defaults" in content:
        raise ConfigError(
            f"--config {file}: defaults: name a group's option as a key instead, such as train: fsdp_bf16"
        )
    return content


def _check(file: Path, options: Sequence[tuple[str, str]], keys: Sequence[str], config_dirs: Sequence[Path]) -> None:
    try:
        check_overrides([*(f"{name}={option}" for name, option in options), *keys], config_dirs)
    except ConfigError as error:
        lines = "\n".join(f"--config {file}: {line}" for line in str(error).splitlines())
        raise ConfigError(lines) from None


def _option_keys(group: str, option: str, config_dirs: Sequence[Path]) -> list[str]:
    """The keys that a group's option sets."""
    file = group_file(group, option, config_dirs)
    if file is None:
        return []  # refused with the command line's other mistakes
    content = dict(_read_group(file))
    found = []
    for path, value in leaves(content, f"{group}."):
        check_key(path)
        found.append(f"++{path}={quoted(value)}")
    return found


def _read_group(file: Path) -> Mapping[str, Any]:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if not content:
        return {}
    if not isinstance(content, Mapping) or "defaults" in content or "@package" in file.read_text():
        raise ConfigError(f"{file}: combines other options, which doesn't go with --config; name them in the file")
    return content
