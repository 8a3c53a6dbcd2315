"""``reward=code``: programs in the response, run in a sandbox against the tests of the row.

What is expected never enters the sandbox. Functions of the program are called from here, with arguments that go in and
values that come out as plain objects; assert statements are executed here, on stand-ins that make such calls. A
program's exit status says nothing, and a row without tests is an error.
"""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hybridengine.rewards.code.program import is_python, program_of
from hybridengine.rewards.code.sandbox import STRICT, Limits, Program, ProgramError, check_sandbox, try_sandbox
from hybridengine.rewards.code.tests import Case, InputOutput, Script, Tests, TestsError, read_tests
from hybridengine.rewards.code.values import value_of
from hybridengine.rewards.signatures import TimeLimitError

MIB = 1 << 20


def code_reward(
    prompt: str,
    response: str,
    answer: Any,
    *,
    metadata: dict[str, Any],
    sandbox: str = STRICT,
    partial: bool = False,
    test_seconds: float = 4.0,
    program_seconds: float = 9.0,
    memory_mib: int = 1024,
    output_mib: float = 4.0,
    float_tolerance: float = 0.0,
    packages: bool = False,
) -> float:
    """1 if the program in the response passes all tests of the row, else 0.

    Args:
        sandbox: ``strict``: refuse to run on a kernel without all protections; ``degraded``: go without what it lacks.
        partial: the share of tests passed instead; all are run (up to one that takes too long), where otherwise the
            first failure ends it.
        test_seconds: time limit of one test, which includes the start of the program.
        program_seconds: of all tests of a response together; keep it below reward.timeout_seconds.
        memory_mib: address space of a program.
        output_mib: what a program may write.
        float_tolerance: relative; numbers in outputs and results may differ by it. 0: they must be equal.
        packages: programs may import what is installed, such as numpy.

    Raises:
        ValueError: the row has no tests, or malformed ones, or an option is wrong.
        SandboxUnavailableError: programs can't be confined here.
        TimeLimitError: the program took too long; it carries the score.
    """
    check_sandbox(sandbox)
    if not (test_seconds > 0 and program_seconds > 0 and float_tolerance >= 0):
        raise ValueError(
            f"code: test_seconds={test_seconds}, program_seconds={program_seconds}: must be greater than 0"
        )
    tests = read_tests(prompt, answer, metadata)
    limits = Limits(
        memory_bytes=memory_mib * MIB,
        output_bytes=int(output_mib * MIB),
        cpu_seconds=program_seconds,
        packages=packages,
    )
    source = program_of(response, prefix=tests.prefix, entry_point=tests.entry_point)
    if not is_python(source):
        return 0.0
    run = _Run(source, tests, limits, sandbox)
    run.tolerance, run.test_seconds, run.deadline = float_tolerance, test_seconds, time.monotonic() + program_seconds
    passed = run.passed(stop_at_failure=not partial)
    score = passed / len(tests.tests) if partial else float(passed == len(tests.tests))
    if run.timed_out:
        raise TimeLimitError(f"the program was still running after {test_seconds:g} s of a test", score)
    return score


def check_tests(
    prompts: list[str],
    responses: list[str],
    answers: list[Any],
    *,
    metadata: list[dict[str, Any]],
    sandbox: str = STRICT,
) -> list[float]:
    """For each row 1.0 if it has tests that can be read, else 0.0.

    Raises:
        SandboxUnavailableError: programs can't be confined here.
    """
    try_sandbox(sandbox)
    found = []
    for prompt, answer, columns in zip(prompts, answers, metadata, strict=True):
        try:
            read_tests(prompt, answer, columns)
            found.append(1.0)
        except TestsError:
            found.append(0.0)
    return found


class _Run:
    """One response against the tests of its row."""

    def __init__(self, source: str, tests: Tests, limits: Limits, sandbox: str) -> None:
        self._source, self._tests, self._limits, self._sandbox = source, tests, limits, sandbox
        self._program: Program | None = None
        self._broken = False  # the program is not to be asked any more
        self.tolerance, self.test_seconds, self.deadline = 0.0, 4.0, 0.0
        self._calls = 0
        self.timed_out = False

    def passed(self, *, stop_at_failure: bool) -> int:
        """How many tests it passes; up to the first that it does not, with ``stop_at_failure``."""
        count = 0
        try:
            for test in self._tests.tests:
                passes = self._passes(test)
                count += passes
                if self.timed_out or (stop_at_failure and not passes):
                    break
        finally:
            self._close()
        return count

    def _passes(self, test: Any) -> bool:
        if isinstance(test, InputOutput):
            return self._prints(test)
        if self._broken:  # it died, or hung, in an earlier test: as a process of its own for each would
            self._close()
            self._broken = False
        if isinstance(test, Case):
            found, value = self._try(test.function, test.args, test.kwargs)
            return found and _same_or_not(value, test.expected, self.tolerance)
        return self._asserts(test)

    # -- functions ---------------------------------------------------------------------------------

    def _try(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(whether it returned, the value)."""
        try:
            return True, self.call(function, args, kwargs)
        except CallError:
            return False, None

    def call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the program; its arguments are changed here as it changed them there.

        Raises:
            CallError: it raised, or the program is gone.
        """
        self._calls += 1
        if self._broken:
            raise CallError("the program is gone")
        if self._program is None:
            self._program = Program(self._source, mode="call", limits=self._limits, sandbox=self._sandbox)
        try:
            reply = self._program.call(function, args, kwargs, seconds=self._seconds())
            if "e" in reply:
                kind, message = reply["e"]
                value, afterwards = call_error(str(kind), str(message)), ()
            else:
                value, afterwards = value_of(reply["v"]), tuple(value_of(reply.get("m", [])))
        except (ProgramError, ValueError, TypeError) as error:
            if isinstance(error, ValueError) and "unmarshallable" in str(error):
                raise TestsError(
                    f"code: a test calls {function} with something that can't be given to a program"
                ) from None
            self._broken = True
            self._note(error)
            raise CallError(str(error)) from None
        if isinstance(value, CallError):
            raise value
        for mine, theirs in zip(args, afterwards, strict=False):
            _update(mine, theirs)
        return value

    def _asserts(self, test: Script) -> bool:
        """Execute assert statements. A program that is gone fails them, even where they expect an exception."""
        names: dict[str, Any] = {"__name__": "tests"}
        calls = self._calls
        try:
            setup = test.setup if test.check is None else f"{self._tests.prefix}\n\n{test.setup}"
            exec(compile(setup, "setup", "exec"), names)  # noqa: S102  the data set's own code
            names |= {name: self._stand_in(name) for name in test.functions}
            exec(compile(test.source, "test", "exec"), names)
            if test.check is not None:
                (function,) = test.functions
                names[test.check](self._stand_in(function))
        except TestsError:
            raise
        except (Exception, SystemExit):
            return False
        if self._calls == calls:
            raise TestsError(f"code: a test never calls the program: {test.source[:200]!r}")
        return not self._broken

    def _stand_in(self, name: str) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, args, kwargs)

        return stand_in

    # -- standard input ----------------------------------------------------------------------------

    def _prints(self, test: InputOutput) -> bool:
        try:
            with Program(self._source, mode="stdin", limits=self._limits, sandbox=self._sandbox) as program:
                printed, ended = program.run(test.stdin.encode(), seconds=self._seconds())
        except ProgramError as error:
            self._note(error)
            return False
        return ended and same_output(printed.decode(errors="replace"), test.stdout, self.tolerance)

    # -- time --------------------------------------------------------------------------------------

    def _note(self, error: Exception) -> None:
        self.timed_out = self.timed_out or (isinstance(error, ProgramError) and error.kind == "timeout")

    def _seconds(self) -> float:
        return max(0.001, min(self.test_seconds, self.deadline - time.monotonic()))

    def _close(self) -> None:
        if self._program is not None:
            self._program.__exit__()
            self._program = None


class CallError(Exception):
    """What a call into the sandbox raised, for the test code that may expect it."""


def call_error(kind: str, message: str) -> CallError:
    """A CallError that ``except ValueError`` catches, too, where the program raised ValueError."""
    of = getattr(builtins, kind, None)
    if isinstance(of, type) and issubclass(of, Exception) and of is not Exception:
        with suppress(TypeError):  # those that are made of more than a message
            return type(kind, (CallError, of), {})(message)
    return CallError(f"{kind}: {message}")


def _update(mine: Any, theirs: Any) -> None:
    """Make a mutable argument what it was in the sandbox after the call."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list) and mine != theirs:
        mine[:] = theirs
    elif isinstance(mine, (dict, set)) and mine != theirs:
        mine.clear()
        mine.update(theirs)


def _same_or_not(value: Any, expected: Any, tolerance: float) -> bool:
    """``_same``; what can't be compared, since it is nested too deep or too large, is not the same."""
    try:
        return _same(value, expected, tolerance)
    except (RecursionError, ArithmeticError):
        return False


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether a result is the expected one; JSON has no tuples, so a list stands for either."""
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(expected)
            and all(_same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        named = {str(key): item for key, item in value.items()}  # JSON's keys are text
        return all(str(key) in named and _same(named[str(key)], item, tolerance) for key, item in expected.items())
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if tolerance and isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(type(value) in (int, float, complex) or type(value) is type(expected)) and bool(value == expected)


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs agree: line by line, but for white space at the ends of lines and empty lines at the end.

    With a ``tolerance`` numbers may differ by it, relatively.

    >>> same_output("1 2 \\n3\\n\\n", "1 2\\n3"), same_output("0.30000000000000004", "0.3", 1e-9)
    (True, True)
    """
    ours, theirs = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, expected))
    if ours == theirs:
        return True
    if not tolerance or len(ours) != len(theirs):
        return False
    words = [[line.split() for line in lines] for lines in (ours, theirs)]
    return all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(*words, strict=True)
    )


def _same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    try:
        numbers = float(ours), float(theirs)
    except ValueError:
        return False
    return math.isclose(*numbers, rel_tol=tolerance, abs_tol=tolerance)
