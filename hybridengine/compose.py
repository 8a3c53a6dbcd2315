"""From command line to Config: Hydra composition, unknown keys refused by their full path."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridengine.config import AuditTerm, Config, RewardTerm, explanation, limits_of, walk

#: Free-form dictionaries whose values have a schema of their own.
TERMS: dict[str, type] = {"reward.terms": RewardTerm, "reward.audit": AuditTerm}


class ConfigError(ValueError):
    """What the user asked for can't be run; the message names the key, the value and what would be right."""


def conf_dir() -> Path:
    """The YAML groups: beside the package when installed, at the repository's top level in a clone."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def config_groups() -> dict[str, list[str]]:
    """Group name -> its options, from the YAML files."""
    groups: dict[str, list[str]] = {}
    for path in sorted(conf_dir().glob("*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    return groups


def register_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)


def _free_form(path: str) -> bool:
    """Whether ``path`` lies inside a dictionary whose keys the user chooses."""
    for name, item in walk():
        if "dict" in str(item.type) and path.startswith(f"{name}."):
            if name in TERMS:
                parts = path.removeprefix(f"{name}.").split(".")
                return len(parts) == 1 or parts[1] in {item.name for item in fields(TERMS[name])}
            return True
    return False


@functools.cache
def _sections(schema: type = Config, prefix: str = "") -> set[str]:
    found = set()
    for name, hint in typing.get_type_hints(schema).items():
        if is_dataclass(hint) and isinstance(hint, type):
            found |= {f"{prefix}{name}"} | _sections(hint, f"{prefix}{name}.")
    return found


#: Keys of earlier versions, and what to write instead.
RENAMED = {"algorithm.correction_cap": "algorithm.correction.bounds=[0, CAP]"}


def check_key(path: str) -> None:
    """Refuse a key that the schema does not have.

    Raises:
        ConfigError: naming the full path and the nearest valid one.
    """
    leaves = [name for name, _ in walk()]
    if path in leaves or path in _sections() or _free_form(path):
        return
    if path in RENAMED:
        raise ConfigError(f"unknown key {path!r}: it is {RENAMED[path]} now")
    raise ConfigError(f"unknown key {path!r}; {_nearest(path, leaves)} (`--help` lists all keys)")


def _nearest(path: str, leaves: list[str]) -> str:
    last = path.rsplit(".", 1)[-1]
    same_leaf = [name for name in leaves if name.rsplit(".", 1)[-1] == last]
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in leaves}
    close = same_leaf or difflib.get_close_matches(path, leaves, n=1, cutoff=0.6)
    close = close or [by_leaf[leaf] for leaf in difflib.get_close_matches(last, by_leaf, n=1, cutoff=0.5)]
    close = close or difflib.get_close_matches(path, leaves, n=1, cutoff=0.0)
    return f"did you mean {close[0]!r}?"


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse unknown keys and groups, with ``+``, ``++``, ``~`` or without, before Hydra composes.

    Raises:
        ConfigError: naming the override.
    """
    groups, leaves = config_groups(), dict(walk())
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise ConfigError(f"override {text!r} can't be read; write key=value ({_first_line(error)})") from None
        name = override.key_or_group
        if name.startswith("hydra"):
            continue
        if override.is_sweep_override():
            raise ConfigError(f"{text}: a run takes one value; a list is written in brackets")
        value = None if override.is_delete() else override.value()
        if name in groups and "." not in name:
            if not override.is_delete() and not isinstance(value, dict) and value not in groups[name]:
                raise ConfigError(f"{name}={_text(value)}: no such choice; {name} can be {' | '.join(groups[name])}")
        else:
            check_key(name)
            if name in _sections() and not override.is_delete() and not isinstance(value, dict):
                raise ConfigError(
                    f"{name}={_text(value)}: {name} is a group of keys; did you mean "
                    f"{_key_that_takes(value, name)}={_text(value)}?"
                )
        for path, inner in _assigned(name, value):
            check_key(path)
            if path in leaves:
                _check_bool(path, inner, str(leaves[path].type))


def _assigned(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every key that one override sets, and its value."""
    if isinstance(value, dict) and not _free_form(f"{path}.*"):
        for name, inner in value.items():
            yield from _assigned(f"{path}.{name}", inner)
    elif "." in path or path not in config_groups():
        yield path, value


def _check_bool(path: str, value: Any, kind: str) -> None:
    """OmegaConf takes every number for a bool: only what says true or false is one."""
    if "bool" not in kind or value is None or isinstance(value, str) and "${" in value:
        return
    if _text(value).lower() not in {"true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"}:
        choices = "true | false | null" if "None" in kind else "true | false"
        raise ConfigError(f"{path}={_text(value)}: must be {choices}")


def _key_that_takes(value: Any, section: str) -> str:
    """The key of a section that a value given to the whole of it was most likely meant for."""
    inside = {name: item for name, item in walk() if name.startswith(f"{section}.")}
    chosen = [name for name, item in inside.items() if value in limits_of(item).choices]
    typed = [name for name, item in inside.items() if str(item.type).split(" ")[0] == type(value).__name__]
    return (chosen + typed + list(inside))[0]


def _text(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(override: str) -> str:
    """Rules of the monitor have spaces and comparisons, for which Hydra wants quotes that the shell has taken away."""
    key, equals, value = override.partition("=")
    if not key.lstrip("+").startswith("monitor.rules.") or value in ("", "null") or value[0] in "'\"{":
        return override
    return f"{key}{equals}'{value}'"


def _open_dictionary(override: str) -> str:
    """A new entry of a free-form dictionary, or several at once, need no ``+`` from the user."""
    key = override.split("=", 1)[0]
    opens = _free_form(key) or any(key == name and "dict" in str(item.type) for name, item in walk())
    return f"++{override}" if not key.startswith(("+", "~")) and opens else override


#: A section whose first key may be set as if it were the section: ``algorithm.correction=tis``.
SHORT_FORMS = {"algorithm.correction": "algorithm.correction.preset"}


def _written_out(override: str) -> str:
    name, equals, value = override.partition("=")
    whole = value.lstrip().startswith("{")
    return f"{SHORT_FORMS[name]}={value}" if name in SHORT_FORMS and equals and not whole else override


def build(overrides: Sequence[str]) -> Config:
    """Compose and type-check the configuration of one run.

    Raises:
        ConfigError: unknown key, choice or wrongly typed value.
    """
    overrides = [_written_out(_quoted(text)) for text in overrides]
    check_overrides(overrides)
    register_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(conf_dir())):
            composed = compose(config_name="config", overrides=[_open_dictionary(text) for text in overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_compose_message(error)) from None
    return to_config(composed)


def to_config(composed: DictConfig) -> Config:
    """DictConfig -> Config; this is where DictConfig ends.

    Raises:
        ConfigError: a required key is missing or a value has the wrong type.
    """
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    raw.pop("hydra", None)
    for path in _paths(raw):
        check_key(path)
    missing = sorted(name for name in OmegaConf.missing_keys(composed) if not name.startswith("hydra"))
    if missing:
        helps = {name: explanation(item) for name, item in walk()}
        lines = [f"  {name}: {helps.get(name, 'required')}" for name in missing]
        raise ConfigError("these keys need a value:\n" + "\n".join(lines))
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(raw)))
    except OmegaConfBaseException as error:
        raise ConfigError(_compose_message(error)) from None
    assert isinstance(config, Config)
    _restore_true_and_false(config)
    reward = config.reward
    reward.terms = {name: _term(f"reward.terms.{name}", RewardTerm, value) for name, value in reward.terms.items()}
    reward.audit = {name: _term(f"reward.audit.{name}", AuditTerm, value) for name, value in reward.audit.items()}
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _compose_message(error: BaseException) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    texts = [_first_line(cause) for cause in causes]
    key = next((str(k) for c in causes if (k := getattr(c, "full_key", None))), None)
    return (f"{key}: " if key else "") + texts[-1]
