"""Overrides of the command line: read, checked one by one, and written so that Hydra reads them back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from hybridengine.config import limits_of, text_of, walk
from hybridengine.config.schema import ConfigError, config_groups, is_dictionary, is_free_form, is_known, sections
from hybridengine.config.suggest import unknown_key


def check_overrides(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> None:
    """Refuse unknown keys and groups, with ``+``, ``++``, ``~`` or without, before Hydra composes.

    Raises:
        ConfigError: naming every override that is wrong, one per line.
    """
    groups = config_groups(config_dirs)
    problems = [problem for text in overrides for problem in _problems(text, groups)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def check_key(path: str) -> None:
    """Refuse a key that the schema does not have.

    Raises:
        ConfigError: naming the full path and the nearest valid one.
    """
    if not is_known(path):
        raise ConfigError(unknown_key(path, [name for name, _ in walk()]))


#: A section whose first key may be set as if it were the section: ``algorithm.correction=tis``.
SHORT_FORMS = {"algorithm.correction": "algorithm.correction.preset"}


def written_out(override: str) -> str:
    """A short form in full; and quotes, which the shell has taken away, around a rule of the monitor: it has spaces and
    comparisons."""
    name, equals, value = override.partition("=")
    if name in SHORT_FORMS and equals and not value.lstrip().startswith("{"):
        return f"{SHORT_FORMS[name]}={value}"
    if name.lstrip("+").startswith("monitor.rules.") and value not in ("", "null") and value[0] not in "'\"{":
        return f"{name}={quoted(value)}"
    return override


def quoted(value: Any) -> str:
    """A value as an override has it: ``[a, "b c"]`` for a list, every text in quotes.

    >>> quoted({"min_terms": 2, "op": "a=b"})
    '{min_terms: 2, op: "a=b"}'

    Raises:
        ConfigError: a dictionary's key that no override can have.
    """
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.double).with_quotes()
    if isinstance(value, Mapping):
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][\w-]*", str(name)):
                raise ConfigError(f"{name!r}: a key in a dictionary is written with letters, digits, _ and - only")
        return "{" + ", ".join(f"{name}: {quoted(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(quoted(inner) for inner in value) + "]"
    return text_of(value)


def open_dictionary(override: str) -> str:
    """A new entry of a dictionary, or several at once, need no ``+`` from the user; nor does an experiment."""
    name = override.split("=", 1)[0]
    if name == "experiment":
        return f"+{override}"
    opens = is_free_form(name) or is_dictionary(name)
    return f"++{override}" if not name.startswith(("+", "~")) and opens else override


def _problems(text: str, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        yield _unreadable(text, error)
        return
    name = override.key_or_group
    if name.startswith("hydra"):
        return
    if override.is_sweep_override():
        yield f"{text}: a run takes one value; a list is written in brackets, a text with a comma in quotes{_how(text)}"
        return
    value = None if override.is_delete() else override.value()
    if name in groups and "." not in name:
        if not override.is_delete() and not isinstance(value, dict) and value not in groups[name]:
            yield f"{name}={text_of(value)}: no such choice; {name} can be {' | '.join(groups[name])}"
    elif not is_known(name):
        yield unknown_key(name, [path for path, _ in walk()])
        return
    elif name in sections() and not override.is_delete() and not isinstance(value, dict):
        meant = _key_that_takes(value, name)
        yield f"{name}={text_of(value)}: {name} is a group of keys; did you mean {meant}={text_of(value)}?"
    yield from _value_problems(override, name, value, groups)


def _value_problems(override: Override, name: str, value: Any, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    leaves = dict(walk())
    for path, inner in _assigned(name, value, groups):
        if not is_known(path):
            yield unknown_key(path, list(leaves))
        elif path in leaves and not override.is_delete():
            yield from _bool_problem(path, inner, str(leaves[path].type))


def _assigned(path: str, value: Any, groups: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """Every key that one override sets, and its value."""
    if isinstance(value, dict) and not is_free_form(f"{path}.*"):
        for name, inner in value.items():
            yield from _assigned(f"{path}.{name}", inner, groups)
    elif "." in path or path not in groups:
        yield path, value


def _bool_problem(path: str, value: Any, kind: str) -> Iterator[str]:
    """Refuse numbers other than 0 and 1 for a bool, which OmegaConf would accept."""
    if "bool" not in kind or value is None or isinstance(value, str) and "${" in value:
        return
    if text_of(value).lower() not in {"true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"}:
        choices = "true | false | null" if "None" in kind else "true | false"
        yield f"{path}={text_of(value)}: must be {choices}"


def _key_that_takes(value: Any, section: str) -> str:
    """The key of a section that a value given to the whole of it was most likely meant for."""
    inside = {name: item for name, item in walk() if name.startswith(f"{section}.")}
    chosen = [name for name, item in inside.items() if value in limits_of(item).choices]
    typed = [name for name, item in inside.items() if str(item.type).split(" ")[0] == type(value).__name__]
    return (chosen + typed + list(inside))[0]


def _unreadable(text: str, error: HydraException) -> str:
    name, equals, _ = text.partition("=")
    if not equals:
        return f"{text!r} is no override; write key=value"
    path = name.lstrip("+~")
    if not is_known(path) and path not in config_groups():
        return unknown_key(path, [leaf for leaf, _ in walk()])
    reason = str(error).strip().splitlines()[0]
    return f"{text}: can't be read ({reason}); a text with = {{ }} [ ] < > , : or the like goes in quotes{_how(text)}"


def _how(text: str) -> str:
    """The override with its value in quotes, as a shell takes it."""
    name, _, value = text.partition("=")
    return f": {shlex.quote(f'{name}={quoted(value)}')}"
