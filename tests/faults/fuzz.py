"""Configurations that nobody would write: each runs or is refused with the wrong key named, never a traceback."""

from __future__ import annotations

import re
import traceback
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hybridengine.config import limits_of, walk
from hybridengine.config.arguments import read_arguments
from hybridengine.config.compose import build, register_schema
from hybridengine.config.schema import ConfigError, config_groups
from hybridengine.distributed.world import World
from hybridengine.validate.contradictions import validate
from hybridengine.validate.resolve import resolve

NUMBERS = "0 1 -1 2 3 7 64 0.5 1.5 -0.5 1e-9 1e30 nan inf -inf 99999999999".split()
OTHER = ["null", "true", "false", "[]", "{}", "[1,2]", "{a:1}", "''", "a", "a=b", "é", "~", "${seed}", "${nothing}",
    "${oc.env:HYBRIDENGINE_NOT_SET}", "'", "/nowhere", "/nowhere/file.py:name", "x.py",
    "1_000", "0x10", "[null]", "['']",
]  # fmt: skip
KEYS = {path: item for path, item in walk()}


@dataclass(slots=True)
class Fuzzed:
    """``failures``: overrides that ended in anything but a run or a ConfigError that names one of its keys."""

    tried: int = 0
    ran: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """Of a run on the embedded model: a few groups and a few keys, each with a value of its kind or of any."""
    groups = {name: options for name, options in config_groups().items() if name not in ("experiment", "data", "model")}
    chosen = draw(st.lists(st.sampled_from(sorted(groups)), unique=True, max_size=2))
    found = [f"{name}={draw(st.sampled_from(groups[name]))}" for name in chosen]
    for path in draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, min_size=1, max_size=4)):
        found.append(f"{path}={draw(_values(path))}")
    return found


def _values(path: str) -> st.SearchStrategy[str]:
    item = KEYS[path]
    own: list[str] = [str(choice) for choice in limits_of(item).choices or ()]
    kind = str(item.type)
    if "int" in kind or "float" in kind:
        own += NUMBERS
    if "bool" in kind:
        own += ["true", "false"]
    return st.sampled_from(own * 3 + OTHER + NUMBERS) if own else st.sampled_from(OTHER + NUMBERS)


def outcome(given_overrides: Sequence[str], ranks: int) -> str | None:
    """What a start makes of it, short of starting: None, or the refusal. Raises whatever else it would end with."""
    try:
        arguments = read_arguments(["+experiment=quickstart", *given_overrides])
        validate(resolve(build(arguments.overrides, arguments.config_dirs)), World(size=ranks, local_size=ranks))
    except ConfigError as error:
        return str(error)
    return None


def fuzz(examples: int, number: int) -> Fuzzed:
    """``examples`` compositions from the seed ``number``."""
    found = Fuzzed()
    register_schema()

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(overrides(), st.sampled_from([1, 2, 3, 4, 8]))
    def start(given_overrides: list[str], ranks: int) -> None:
        found.tried += 1
        try:
            told = outcome(given_overrides, ranks)
        except BaseException as error:  # noqa: BLE001  what a user would meet
            where = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            found.failures.append(f"{' '.join(given_overrides)} on {ranks}: {told}")
            return
        if told is None:
            found.ran += 1
        elif names_a_key(told, given_overrides):
            found.refused += 1
        else:
            found.failures.append(f"{' '.join(given_overrides)} on {ranks}: names no key: {told}")

    typing.cast(typing.Callable[[], None], start)()
    return found


def names_a_key(told: str, given_overrides: Sequence[str]) -> bool:
    """Whether a refusal names a key of the schema, or the group, that the overrides set."""
    names = [text.partition("=")[0] for text in given_overrides]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", told) for name in [*names, *KEYS])
