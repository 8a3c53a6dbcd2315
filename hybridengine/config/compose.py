"""From command line to Config: Hydra composition, unknown keys refused by their full path."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridengine.config import TERMS, Config, explanation, limits_of, walk
from hybridengine.config.overrides import check_key, check_overrides, open_dictionary, quoted, written_out
from hybridengine.config.schema import ConfigError, conf_dir, config_groups

__all__ = ["ConfigError", "build", "conf_dir", "config_groups", "hydra_overrides", "register_schema", "to_config"]


@functools.cache
def register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)


@functools.cache
def _schema() -> DictConfig:
    """The schema as OmegaConf has it; merging copies it."""
    return OmegaConf.structured(Config)


def build(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Config:
    """Compose and type-check the configuration of one run.

    Args:
        config_dirs: directories with groups of the user's own, as conf/ has them.

    Raises:
        ConfigError: every unknown key or choice, or a wrongly typed value.
    """
    given = hydra_overrides(overrides, config_dirs)
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(conf_dir())):
            composed = compose(config_name="config", overrides=given)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_compose_message(error)) from None
    return to_config(composed)


def hydra_overrides(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """The overrides, checked, as Hydra takes them.

    Raises:
        ConfigError: every one that is wrong.
    """
    directories = [*config_dirs, *_search_path(overrides)]
    overrides = [written_out(text) for text in overrides]
    check_overrides(overrides, directories)
    given = [open_dictionary(text) for text in overrides if not text.startswith("hydra.searchpath=")]
    if directories:
        given.append(f"hydra.searchpath={quoted([f'file://{path.resolve()}' for path in directories])}")
    return given


def _search_path(overrides: Sequence[str]) -> list[Path]:
    """Directories that ``hydra.searchpath=[file:///dir]`` names."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found: list[Path] = []
    for text in overrides:
        if text.startswith("hydra.searchpath="):
            try:
                value = OverridesParser.create().parse_override(text).value()
            except HydraException:
                raise ConfigError(f"{text}: write hydra.searchpath=[file:///directory]") from None
            for place in value if isinstance(value, list) else [value]:
                path = Path(str(place).removeprefix("file://"))
                if not path.is_dir():
                    raise ConfigError(f"{text}: {path} is no directory; write hydra.searchpath=[file:///directory]")
                found.append(path)
    return found


def to_config(composed: DictConfig) -> Config:
    """DictConfig -> Config; this is where DictConfig ends.

    Raises:
        ConfigError: a required key is missing or a value has the wrong type.
    """
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    raw.pop("hydra", None)
    unknown = [problem for path in _paths(raw) if (problem := _unknown(path))]
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        missing = sorted(name for name in OmegaConf.missing_keys(composed) if not name.startswith("hydra"))
    except OmegaConfBaseException as error:  # an interpolation, such as an environment variable that is not set
        raise ConfigError(_compose_message(error)) from None
    if missing:
        helps = {name: explanation(item) for name, item in walk()}
        lines = [f"  {name}: {helps.get(name, 'required')}" for name in missing]
        raise ConfigError("these keys need a value:\n" + "\n".join(lines))
    try:
        config = OmegaConf.to_object(OmegaConf.merge(_schema(), OmegaConf.create(raw)))
    except OmegaConfBaseException as error:
        raise ConfigError(_compose_message(error)) from None
    assert isinstance(config, Config)
    _restore_true_and_false(config)
    for path, schema in TERMS.items():
        *parents, leaf = path.split(".")
        section = functools.reduce(getattr, parents, config)
        terms = {name: _term(f"{path}.{name}", schema, value) for name, value in getattr(section, leaf).items()}
        setattr(section, leaf, terms)
    return config


def _restore_true_and_false(config: Config) -> None:
    """``data.chat=false`` arrives as the text "False" where the key is a choice of texts."""
    for path, item in walk():
        if "true" in limits_of(item).choices:
            *parents, leaf = path.split(".")
            section = functools.reduce(getattr, parents, config)
            setattr(section, leaf, getattr(section, leaf).lower())


def _term(path: str, schema: type, value: Any) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), value))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_compose_message(error)}") from None


def _paths(node: dict[Any, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        found.append(path)
        if isinstance(value, dict):
            found += _paths(value, f"{path}.")
    return found


def _unknown(path: str) -> str | None:
    try:
        check_key(path)
    except ConfigError as error:
        return str(error)
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _compose_message(error: BaseException) -> str:
    if in_file := re.match(r"In '(.*?)': .*\n(.*)\n +full_key: (\S+)", str(error)):
        file, text, key = in_file.groups()
        return f"{file}: {_unknown(key) or f'{key}: {text}'}"
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    texts = [_first_line(cause) for cause in causes]
    key = next((str(k) for c in causes if (k := getattr(c, "full_key", None))), None)
    return (f"{key}: " if key else "") + texts[-1]
