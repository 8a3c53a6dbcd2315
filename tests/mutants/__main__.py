"""Put every fault of the table into a copy of the repository and run the tests that have to see it.

    python -m tests.mutants                 all, two at a time
    python -m tests.mutants resume KV       those with one of these words in their names

First the tests run without a fault: all have to pass. A fault whose text is not found exactly once is an error: the
table has to follow the code. Only a test that fails is a kill; tests that are not through in time are named beside the
survivors. The last line is one JSON object; the exit status is 1 where any fault was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.mutants.table import MUTANTS, Mutant

SECONDS = 240.0
BASELINE_SECONDS = 900.0


def copy_of_repository(place: Path) -> Path:
    """What git tracks or would, and the native library, which tests must not build again."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in [*names, *(str(path.relative_to(ROOT)) for path in (ROOT / "hybridengine").glob("*.so"))]:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def mutate(mutant: Mutant, root: Path) -> str:
    """Write the fault; the file's text before.

    Raises:
        ValueError: the text to replace does not stand there exactly once.
    """
    path = root / "hybridengine" / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: hybridengine/{mutant.file} has its text {before.count(mutant.old)} times")
    path.write_text(before.replace(mutant.old, mutant.new))
    return before


def run_tests(names: Iterable[str], root: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """The tests below ``tests/`` of a copy, until the first that fails.

    Raises:
        subprocess.TimeoutExpired: they are not through in time.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
         *(f"tests/{name}" for name in names)],
        cwd=root, capture_output=True, text=True, timeout=seconds,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)},
    )  # fmt: skip


def check_unchanged(mutants: list[Mutant], root: Path) -> None:
    """Run the tests of these faults without any fault: a test that fails anyway would seem to notice everything.

    Raises:
        ValueError: one fails, or they take longer than ``BASELINE_SECONDS``.
    """
    names = dict.fromkeys(name for mutant in mutants for name in mutant.tests)
    try:
        done = run_tests(names, root, BASELINE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"without a fault the tests are not through in {BASELINE_SECONDS:.0f} s") from error
    if done.returncode != 0:
        raise ValueError(f"the tests fail without a fault: {done.stdout[-1500:]}{done.stderr[-500:]}")


def outcome(mutant: Mutant, root: Path) -> str:
    """``killed`` where a test fails, ``SURVIVES`` where all pass, ``TIMEOUT`` where they are not through in time.

    A timeout is no kill: a loaded machine gives one, too.

    Raises:
        ValueError: the fault has no place, or no test ran.
    """
    before = mutate(mutant, root)
    try:
        done = run_tests(mutant.tests, root, SECONDS)
    except subprocess.TimeoutExpired:
        return "TIMEOUT"
    finally:
        (root / "hybridengine" / mutant.file).write_text(before)
    if done.returncode not in (0, 1):  # no tests, or none that can be collected: nothing was tried
        raise ValueError(f"{mutant.name}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return "killed" if done.returncode else "SURVIVES"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the names of faults; default: all")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    found: dict[str, list[str]] = {"killed": [], "SURVIVES": [], "TIMEOUT": [], "ERROR": []}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies = [copy_of_repository(Path(directory) / str(number)) for number in range(given.processes)]
        begin = time.monotonic()
        try:
            check_unchanged(chosen, copies[0])
        except ValueError as error:
            print(f"ERROR     {error}")
            print(json.dumps({"mutants": len(chosen), "killed": 0, "survivors": [], "errors": ["unchanged"]}))
            return 1
        print(f"{'unchanged':9} {time.monotonic() - begin:4.0f} s  all tests pass", flush=True)
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def attempt(mutant: Mutant) -> None:
            root, begin, detail = free.get(), time.monotonic(), mutant.name
            try:
                what = outcome(mutant, root)
            except ValueError as error:
                what, detail = "ERROR", str(error)
            finally:
                free.put(root)
            found[what].append(mutant.name)
            print(f"{what:9} {time.monotonic() - begin:4.0f} s  {detail}", flush=True)

        with ThreadPoolExecutor(given.processes) as pool:
            list(pool.map(attempt, chosen))
    bad = {"survivors": found["SURVIVES"], "timeouts": found["TIMEOUT"], "errors": found["ERROR"]}
    print(json.dumps({"mutants": len(chosen), "killed": len(found["killed"]), **bad}))
    return 1 if any(bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
