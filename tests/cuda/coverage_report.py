"""``python -m tests.cuda.coverage_report``: which lines that only a GPU reaches do the tests execute here?

Runs the tests over the stand-ins under coverage, in all their processes, and counts the lines of modules and classes
that serve CUDA alone and of branches behind a question that only CUDA answers with yes. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hybridengine"
#: Whole modules.
MODULES = ("platform/cuda", "native_cuda.py", "sync/transfer/cuda_ipc.py", "sync/transfer/device_pipeline.py",
           "engines/rollout/vllm/cuda.py")  # fmt: skip
#: Classes and functions of other modules.
DEFINITIONS = {"SGLangOnCuda", "outside_the_sleeping_pool", "weights_outside_memory_saver"}
#: Attributes and methods of Platform that are true on a GPU only.
QUESTIONS = {"separate_memory", "parks_frozen", "runs_transformer_engine", "has_varlen_attention", "is_available"}
TESTS = (
    "tests/cuda", "tests/unit/test_native_cuda.py", "tests/unit/engines", "tests/unit/memory", "tests/unit/platform",
    "tests/unit/sync/transfer",
)  # fmt: skip
#: Lines that can't be executed here, by a part of their text: the reason.
NOT_HERE = {
    "import transformer_engine": "Transformer Engine has no CPU build",
}


def cuda_lines(path: Path) -> set[int]:
    """Lines of statements that only a GPU reaches; without docstrings and definitions' own heads."""
    tree = ast.parse(path.read_text())
    name = path.relative_to(PACKAGE).as_posix()
    if name.startswith(MODULES):
        return set(_statements(tree.body))
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in DEFINITIONS:
            found |= set(_statements(node.body))
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                found |= _behind_questions(block)
    return found


def _behind_questions(block: list[ast.stmt]) -> set[int]:
    found: set[int] = set()
    for i, statement in enumerate(block):
        if not isinstance(statement, ast.If) or (answer := _answer(statement.test)) is None:
            continue
        if answer:
            found |= set(_statements(statement.body))
        else:
            found |= set(_statements(statement.orelse))
            if isinstance(statement.body[-1], (ast.Return, ast.Raise, ast.Continue)):
                found |= set(_statements(block[i + 1 :]))
    return found


def _answer(test: ast.expr) -> bool | None:
    """Whether this is true on a GPU; None where it is no question about the device alone."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _answer(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((answer for value in test.values if (answer := _answer(value)) is not None), None)
    called = test.func if isinstance(test, ast.Call) else test
    return True if isinstance(called, ast.Attribute) and called.attr in QUESTIONS else None


def _statements(block: list[ast.stmt]) -> Iterator[int]:
    for statement in block:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring, or the body of a protocol
        if not isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            yield statement.lineno
        for field in ("body", "orelse", "finalbody", "handlers"):
            for inner in getattr(statement, field, []):
                yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def run(scratch: Path, tests: list[str]) -> dict[str, set[int]]:
    """Executed lines by file, relative to the package."""
    settings = scratch / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {PACKAGE}\nparallel = true\ndata_file = {scratch / 'data'}\nsigterm = true\n"
        "concurrency = multiprocessing, thread\npatch = subprocess, _exit\n"
    )
    coverage = [sys.executable, "-m", "coverage"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COVERAGE_RCFILE": str(settings)}
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    code = subprocess.run([*coverage, "run", "-m", "pytest", *options, *tests], cwd=ROOT, env=environment).returncode
    if code:
        raise SystemExit(f"tests failed with status {code}; a coverage of failing tests is none")
    subprocess.run([*coverage, "combine", "-q"], cwd=ROOT, env=environment, check=True)
    report = scratch / "report.json"
    subprocess.run([*coverage, "json", "-q", "-o", str(report)], cwd=ROOT, env=environment, check=True)
    files = json.loads(report.read_text())["files"]
    return {str((ROOT / name).relative_to(PACKAGE)): set(entry["executed_lines"]) for name, entry in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        executed = run(Path(scratch), given.tests)
    total, missing, excused = 0, [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, lines = path.relative_to(PACKAGE).as_posix(), path.read_text().splitlines()
        wanted = cuda_lines(path)
        total += len(wanted)
        for line in sorted(wanted - executed.get(name, set())):
            text = lines[line - 1].strip()
            reason = next((reason for mark, reason in NOT_HERE.items() if mark in text), "")
            (excused if reason else missing).append(f"{name}:{line}")
            print(f"not executed: {name}:{line}  {text}" + (f"   ({reason})" if reason else ""))
    reached = total - len(missing) - len(excused)
    print(json.dumps({
        "cuda_lines": total, "executed": reached, "fraction": round(reached / total, 4), "missing": missing,
        "not_possible_here": excused,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
