"""reward=code: which program a response contains, which tests a row has, and what passes them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hybridengine.rewards.code import call_error, check_tests, code_reward, same_output
from hybridengine.rewards.code.harness import encode
from hybridengine.rewards.code.program import program_of
from hybridengine.rewards.code.sandbox import check_sandbox
from hybridengine.rewards.code.tests import Case, InputOutput, Script, TestsError, read_tests
from hybridengine.rewards.code.values import decode, value_of
from hybridengine.rewards.signatures import TimeLimitError

try:
    check_sandbox("degraded")
except ValueError as error:
    pytest.skip(f"needs a sandbox: {error}", allow_module_level=True)

ADD = "def add(a, b):\n    return a + b\n"
CASES = {"entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]}


def score(
    response: str, answer: Any, *, prompt: str = "", metadata: dict[str, Any] | None = None, **options: Any
) -> float:
    return code_reward(prompt, response, answer, metadata=metadata or {}, sandbox="degraded", **options)


# -- programs --------------------------------------------------------------------------------------

HEAD = 'from typing import List\n\ndef add(a, b):\n    """Add."""\n'


@pytest.mark.parametrize(
    ("response", "prefix", "program"),
    [
        pytest.param(ADD, "", ADD, id="all-of-it"),
        pytest.param(f"Sure!\n```python\n{ADD}```\nDone.", "", ADD, id="fenced"),
        pytest.param(f"```py\nx = 1\n```\nbetter:\n```\n{ADD}```", "", ADD, id="the-last-block"),
        pytest.param(f"```python\n{ADD}```\nrun:\n```bash\npython add.py\n```", "", ADD, id="not-a-shell-block"),
        pytest.param(f"```python\n{ADD}", "", ADD, id="never-closed"),
        pytest.param("    return a + b\n", HEAD, f"{HEAD}    return a + b\n", id="continues"),
        pytest.param(
            "    return a + b\n\n\ndef other(a", HEAD, f"{HEAD}    return a + b\n\n\n", id="continues-too-far"
        ),
        pytest.param(
            "```python\nreturn a + b\n```", HEAD, f"{HEAD}    return a + b\n", id="continues-without-indentation"
        ),
        pytest.param(f"```python\n{ADD}```", HEAD, f"{HEAD}\n\n{ADD}", id="defines-it-anew"),
    ],
)
def test_program_of_a_response(response: str, prefix: str, program: str) -> None:
    assert program_of(response, prefix=prefix, entry_point="add") == program


# -- tests -----------------------------------------------------------------------------------------


def test_tests_in_every_form() -> None:
    assert read_tests("", CASES, {}).tests[0] == Case(function="add", args=(1, 2), kwargs={}, expected=3)
    assert read_tests("", json.dumps(CASES), {}) == read_tests("", None, CASES)
    mbpp = {
        "test_list": ["assert add(1, 2) == 3", "assert math.sqrt(add(2, 2)) == 2"],
        "test_setup_code": "import math",
    }
    assert [t.functions for t in read_tests("", None, mbpp).tests] == [{"add"}, {"add"}]
    human_eval = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
    found = read_tests(HEAD, None, human_eval)
    assert isinstance(found.tests[0], Script) and found.tests[0].check == "check" and found.prefix == HEAD
    apps = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
    assert read_tests("", json.dumps(apps), {}).tests[1] == InputOutput(stdin="2 2\n", stdout="4\n")
    called = {"fn_name": "add", "inputs": [[1, 2], "2\n2"], "outputs": [3, "4"]}
    assert [(t.args, t.expected) for t in read_tests("", called, {}).tests] == [((1, 2), 3), ((2, 2), 4)]
    pairs = json.dumps([{"input": "1 2", "output": "3"}])
    assert read_tests("", pairs, {}).tests == (InputOutput(stdin="1 2", stdout="3"),)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(None, "has no tests", id="none"),
        pytest.param("4", "has no tests", id="a-number"),
        pytest.param({"entry_point": "add", "tests": []}, "has no tests", id="empty"),
        pytest.param({"tests": [{"args": [1], "expected": 1}]}, "KeyError: 'entry_point'", id="no-entry-point"),
        pytest.param({"entry_point": "f", "tests": [{"args": [1]}]}, "KeyError: 'expected'", id="nothing-expected"),
        pytest.param({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs", id="unpaired"),
        pytest.param({"test_list": ["assert add(1,"]}, "SyntaxError", id="no-python"),
    ],
)
def test_rows_without_tests_are_an_error(answer: Any, message: str) -> None:
    with pytest.raises(TestsError, match=message):
        score(ADD, answer)
    assert check_tests([""], [""], [answer], metadata=[{}], sandbox="degraded") == [0.0]


def test_tests_that_never_call_the_program_are_an_error() -> None:
    with pytest.raises(TestsError, match="never calls the program"):
        score(ADD, {"entry_point": "add", "test": "def check(candidate):\n    pass\n"})


# -- verdicts --------------------------------------------------------------------------------------

MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
HUMAN_EVAL = {"entry_point": "add", "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}
APPS = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
MAIN = "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n"
READS = "a, b = map(int, input().split())\nprint(a + b)\n"
RIGHT: dict[str, tuple[str, Any]] = {
    "cases": (ADD, CASES),
    "asserts": (ADD, MBPP),
    "check": (ADD, HUMAN_EVAL),
    "stdin": (READS, APPS),
    "stdin-main": (f"{MAIN}if __name__ == '__main__':\n    main()\n", APPS),
    "stdin-read": ("import sys\na, b = map(int, sys.stdin.read().split())\nsys.stdout.write(str(a + b))\n", APPS),
    "stdin-exit": (f"import sys\n{READS}sys.exit()\n", APPS),
    "stdin-thread": (
        f"import threading\n{MAIN}"
        "threading.stack_size(1 << 26)\nthreading.Thread(target=main).start()\n",
        APPS,
    ),
    "method": ("class Solution:\n    def add(self, a, b):\n        return a + b\n", CASES),
    "prints-too": ("def add(a, b):\n    print('debug', a)\n    return a + b\n", CASES),
    "imports": (f"import collections, math, re, json, itertools, heapq, typing, dataclasses\n{ADD}", CASES),
    "exception": (
        "def add(a, b):\n    raise ValueError('no')\n",
        {"test_list": ["try:\n    add(1, 2)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"]},
    ),
    "in-place": (
        "def double(xs):\n    xs[:] = [2 * x for x in xs]\n",
        {"test_list": ["xs = [1, 2]\ndouble(xs)\nassert xs == [2, 4]"]},
    ),
    "tuples": ("def pair(a):\n    return (a, [a])\n", {"test_list": ["assert pair(1) == (1, [1])"]}),
    "tuple-for-json-list": (
        "def pair(a):\n    return (a, a)\n", {"entry_point": "pair", "tests": [{"args": [1], "expected": [1, 1]}]},
    ),
    "json-keys": ("def d():\n    return {1: 'a'}\n", {"entry_point": "d", "tests": [{"expected": {"1": "a"}}]}),
    "kwargs": (ADD, {"entry_point": "add", "tests": [{"kwargs": {"a": 1, "b": 2}, "expected": 3}]}),
    "state": ("n = 0\ndef add(a, b):\n    global n\n    n += 1\n    return a + b\n", MBPP),
}  # fmt: skip


@pytest.mark.parametrize(("program", "answer"), RIGHT.values(), ids=RIGHT)
def test_right_programs_pass(program: str, answer: Any) -> None:
    assert score(program, answer) == 1.0


DEEP = "def f(x):\n    v = []\n    for _ in range(400):\n        v = [v]\n    return v\n"
FORGED = """
import os, sys
def f(x):
    nonce = sys._getframe(1).f_locals["nonce"]
    body = ('{"n":"%s",%s}' % (nonce, BODY)).encode()
    for fd in range(3, 9):
        try:
            os.write(fd, len(body).to_bytes(4, "big") + body)
        except OSError:
            pass
    os._exit(0)
"""
ONE = {"entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
WRONG: dict[str, tuple[str, Any]] = {
    "deep": (DEEP, {"entry_point": "f", "tests": [{"args": [1], "expected": [[[[[1]]]]]}]}),
    "forged-arguments": (FORGED.replace("BODY", repr('"v":0,"m":7')), ONE),
    "forged-error": (FORGED.replace("BODY", repr('"e":7')), ONE),
    "forged-value": (FORGED.replace("BODY", repr('"v":{"q":1}')), ONE),
    "wrong-value": ("def add(a, b):\n    return a * b\n", CASES),
    "wrong-second": ("def add(a, b):\n    return 3\n", CASES),
    "wrong-type": ("def add(a, b):\n    return str(a + b)\n", CASES),
    "bool-for-int": ("def f(a):\n    return True\n", {"entry_point": "f", "tests": [{"args": [1], "expected": 1}]}),
    "syntax": ("def add(a, b:\n", CASES),
    "prose": ("I would add the two numbers.", CASES),
    "nothing": ("", CASES),
    "raises": ("def add(a, b):\n    raise ValueError\n", CASES),
    "raises-at-load": (f"{ADD}raise ValueError\n", CASES),
    "no-such-function": ("def plus(a, b):\n    return a + b\n", CASES),
    "asserts-wrong": ("def add(a, b):\n    return 0\n", MBPP),
    "check-wrong": ("def add(a, b):\n    return 0\n", HUMAN_EVAL),
    "stdin-wrong": ("print(5)\n", APPS),
    "stdin-right-then-raises": (f"{READS}raise ValueError\n", APPS),
    "stdin-right-then-dies": (f"{READS}import os, sys\nsys.stdout.flush()\nos._exit(0)\n", APPS),
    "stdin-right-then-exits-with-an-error": (f"{READS}import sys\nsys.exit(1)\n", APPS),
    "swallowed": (
        "import os\ndef add(a, b):\n    os._exit(0)\n",
        {"test_list": ["try:\n    add(1, 2)\nexcept Exception:\n    pass"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "answer"), WRONG.values(), ids=WRONG)
def test_wrong_programs_do_not(program: str, answer: Any) -> None:
    assert score(program, answer) == 0.0


def test_partial_credit() -> None:
    """Two of four; a program that dies is started anew for the next test."""
    tests = {"entry_point": "f", "tests": [{"args": [i], "expected": i} for i in range(4)]}
    program = "import os\ndef f(x):\n    if x == 1:\n        os._exit(0)\n    return x if x != 2 else 0\n"
    assert score(program, tests, partial=True) == 0.5
    assert score(program, tests) == 0.0


def test_time_limits() -> None:
    program = "import time\ndef add(a, b):\n    time.sleep(60)\n"
    begin = time.monotonic()
    with pytest.raises(TimeLimitError) as caught:
        score(program, CASES, test_seconds=0.5)
    assert caught.value.score == 0.0 and time.monotonic() - begin < 5.0
    tests = {"entry_point": "f", "tests": [{"args": [i], "expected": i} for i in range(4)]}
    late = "import time\ndef f(x):\n    time.sleep(60 if x == 2 else 0)\n    return x\n"
    with pytest.raises(TimeLimitError) as caught:
        score(late, tests, test_seconds=0.5, partial=True)
    assert caught.value.score == 0.5  # and the fourth is not tried


def test_memory_limit() -> None:
    program = "def add(a, b):\n    x = bytearray(300 << 20)\n    return a + b\n"
    assert score(program, CASES, memory_mib=512) == 1.0
    assert score(program, CASES, memory_mib=256) == 0.0


def test_large_input_and_output() -> None:
    """More than a pipe holds, in both directions at once."""
    numbers = "\n".join(map(str, range(50_000)))
    program = "import sys\nfor line in sys.stdin:\n    print(line.strip())\n"
    assert score(program, {"inputs": [numbers], "outputs": [numbers]}) == 1.0
    assert score(program, {"inputs": [numbers], "outputs": [numbers]}, output_mib=0.1) == 0.0
    echo = {"entry_point": "f", "tests": [{"args": [list(range(50_000))], "expected": list(range(50_000))}]}
    assert score("def f(x):\n    return x\n", echo) == 1.0
    ignores = "print(sum(range(50_000)))\n"
    assert score(ignores, {"inputs": [numbers * 10], "outputs": [str(sum(range(50_000)))]}) == 1.0


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        pytest.param("1 2 \n3\n\n", "1 2\n3", 0.0, True, id="white-space-at-ends"),
        pytest.param("1  2", "1 2", 0.0, False, id="white-space-inside"),
        pytest.param("1\n2", "1 2", 0.0, False, id="lines"),
        pytest.param("0.30000000000000004", "0.3", 0.0, False, id="no-tolerance"),
        pytest.param("0.30000000000000004 yes", "0.3 yes", 1e-9, True, id="tolerance"),
        pytest.param("0.31", "0.3", 1e-9, False, id="beyond-it"),
        pytest.param("", "", 0.0, True, id="nothing"),
        pytest.param("x", "", 0.0, False, id="something-for-nothing"),
    ],
)
def test_outputs(printed: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_output(printed, expected, tolerance) == same


def test_float_tolerance_of_results() -> None:
    tests = {"entry_point": "f", "tests": [{"args": [0.1, 0.2], "expected": 0.3}]}
    program = "def f(a, b):\n    return a + b\n"
    assert score(program, tests) == 0.0 and score(program, tests, float_tolerance=1e-9) == 1.0


def test_packages_only_when_asked_for() -> None:
    program = "import numpy\ndef add(a, b):\n    return numpy.int64(a) + b\n"
    assert score(program, CASES, packages=True, test_seconds=20.0, program_seconds=20.0) == 1.0
    assert score(program, CASES) == 0.0


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1 << 70, -(1 << 70), 1.5, float("inf"), "ünï\ud800\n\"", [1, [2]], (1, (2,)),
        {1: "a", (1, 2): [3]}, {1, 2}, frozenset({1}), b"\x00\xff", bytearray(b"x"), 1 + 2j, range(1, 9, 2),
        {"t": [1]}, [], (), {}, set(),
    ],
    ids=repr,
)  # fmt: skip
def test_values_keep_their_type(value: Any) -> None:
    back = value_of(decode(encode(value).encode()))
    assert back == value and type(back) is type(value)


def test_values_that_stay_inside() -> None:
    class Mine:
        def __eq__(self, other: object) -> bool:
            return True

    back = value_of(decode(encode(Mine()).encode()))
    assert back != back and repr(back).endswith("Mine>")
    with pytest.raises(ValueError, match="more than 10 parts"):
        encode(list(range(20)), 10)
    for bad in (b'{"x": 1}', b'{"n": ["os", "1"]}', b'{"d": [1]}', b'{"t": 1}', b'{"s": [[1]]}', b'{"i": [1]}'):
        with pytest.raises(ValueError):
            value_of(decode(bad))
    with pytest.raises(ValueError):
        value_of(decode(b"[" * 100_000))


def test_errors_are_what_the_test_code_expects() -> None:
    with pytest.raises(ValueError, match="no"):
        raise call_error("ValueError", "no")
    assert not isinstance(call_error("SystemExit", "0"), SystemExit)
    assert str(call_error("UnicodeDecodeError", "x")) == "UnicodeDecodeError: x"
    assert str(call_error("Custom", "x")) == "Custom: x"
