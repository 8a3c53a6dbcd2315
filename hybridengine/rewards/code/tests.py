r"""The tests of a row of data, in the forms that data sets have them.

========== ============================================================================ ==========================
form       columns (in the answer, an object or its JSON text, or beside it)             known from
========== ============================================================================ ==========================
cases      ``entry_point``, ``tests``: [{args, kwargs, expected}, ...]
asserts    ``test_list`` of assert statements, ``test_setup_code``                       MBPP
check      ``test`` with ``def check(candidate)``, ``entry_point``                       HumanEval
inputs     ``inputs``, ``outputs``: texts; with ``fn_name``, JSON arguments and results  APPS, TACO, verl
           or ``tests``: [{input, output}, ...]
========== ============================================================================ ==========================
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridengine.rewards.code.program import is_python


class TestsError(ValueError):
    """A row has no tests, or such as can't be run."""

    __test__ = False  # no test class for pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call and what it should return."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Python that asserts, executed beside the worker, with stand-ins for the program's functions.

    Attributes:
        source: what is executed.
        setup: executed first, such as imports and helpers.
        functions: names that stand for the program's.
        check: name of a function in ``source`` that takes the program's function.
    """

    source: str
    setup: str
    functions: frozenset[str]
    check: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOutput:
    """What a program reads and what it should print."""

    stdin: str
    stdout: str


Test = Case | Script | InputOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Of one row. ``prefix``: text of the prompt that the program may continue, and whose helpers the tests may use."""

    __test__ = False

    tests: tuple[Test, ...]
    prefix: str = ""
    entry_point: str | None = None


def read_tests(prompt: str, answer: Any, metadata: dict[str, Any]) -> Tests:
    """The tests of a row.

    Raises:
        TestsError: none, or malformed.
    """
    row = metadata | _as_object(answer)
    try:
        tests = tuple(_tests(row, prompt))
    except (KeyError, TypeError, AttributeError, SyntaxError, json.JSONDecodeError) as error:
        raise TestsError(f"code: the row's tests can't be read ({type(error).__name__}: {error})") from None
    if not tests:
        raise TestsError(
            "code: the row has no tests; give entry_point and tests, test_list, test with entry_point, or inputs and "
            f"outputs, in the answer or beside it; it has {', '.join(sorted(row)) or 'nothing'}"
        )
    prefix = row.get("prefix") or (prompt if any(isinstance(t, Script) and t.check for t in tests) else "")
    return Tests(tests=tests, prefix=prefix if is_python(prefix) else "", entry_point=_entry_point(row))


def _as_object(answer: Any) -> dict[str, Any]:
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            return {}
    if isinstance(answer, list):
        return {"test_list": answer} if all(isinstance(item, str) for item in answer) else {"tests": answer}
    return answer if isinstance(answer, dict) else {}


def _entry_point(row: dict[str, Any]) -> str | None:
    return row.get("entry_point") or row.get("fn_name") or None


def _tests(row: dict[str, Any], prompt: str) -> Iterator[Test]:
    name = _entry_point(row)
    if row.get("inputs") is not None and row.get("outputs") is not None:
        yield from _inputs(list(row["inputs"]), list(row["outputs"]), name)
    elif row.get("test_list"):
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        for statement in row["test_list"]:
            yield Script(source=statement, setup=setup, functions=_unknown_names(statement, setup))
    elif isinstance(row.get("test"), str) and name:
        ast.parse(row["test"])
        yield Script(source=row["test"], setup="", functions=frozenset({name}), check="check")
    else:
        tests = row.get("tests") or ()
        for test in json.loads(tests) if isinstance(tests, str) else tests:
            if "input" in test and "output" in test:
                yield from _inputs([test["input"]], [test["output"]], name)
            else:
                if not name:
                    raise KeyError("entry_point")
                yield Case(
                    function=name, args=tuple(test.get("args", ())), kwargs=dict(test.get("kwargs", {})),
                    expected=test["expected"],
                )  # fmt: skip


def _inputs(inputs: list[Any], outputs: list[Any], function: str | None) -> Iterator[Test]:
    if len(inputs) != len(outputs):
        raise TypeError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        if function is None:
            lines = [text if isinstance(text, str) else "\n".join(map(str, text)) for text in (given, expected)]
            yield InputOutput(stdin=lines[0], stdout=lines[1])
        else:
            args = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
            value = json.loads(expected) if isinstance(expected, str) else expected
            yield Case(function=function, args=tuple(args), kwargs={}, expected=value)


def _unknown_names(statement: str, setup: str) -> frozenset[str]:
    """Names that an assert uses and nothing defines: the program's."""
    defined = set(dir(builtins))
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    names: set[str] = set()
    for node in ast.walk(ast.parse(statement)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                names.add(node.id)
            else:
                defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(names - defined)
