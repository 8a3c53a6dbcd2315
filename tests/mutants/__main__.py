"""Put every fault of the table into a copy of the repository and run the tests that have to see it.

    python -m tests.mutants                 all, two at a time
    python -m tests.mutants resume KV       those with one of these words in their names

A fault whose text is not found exactly once is an error: the table has to follow the code. The last line is one JSON
object; the exit status is 1 where a fault survives.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.mutants.table import MUTANTS, Mutant

SECONDS = 240.0


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


def survives(mutant: Mutant, root: Path) -> str | None:
    """The end of the tests' output where all of them pass; None where one fails, or is not through in time."""
    before = mutate(mutant, root)
    try:
        tests = [f"tests/{name}" for name in mutant.tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests],
            cwd=root, capture_output=True, text=True, timeout=SECONDS,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    finally:
        (root / "hybridengine" / mutant.file).write_text(before)
    if done.returncode == 1:
        return None
    if done.returncode != 0:  # no tests, or none that can be collected: nothing was tried
        raise ValueError(f"{mutant.name}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return done.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the names of faults; default: all")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    survivors: list[str] = []
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.processes):
            free.put(copy_of_repository(Path(directory) / str(number)))

        def attempt(mutant: Mutant) -> None:
            root, begin = free.get(), time.monotonic()
            try:
                lives = survives(mutant, root)
                if lives is not None:
                    survivors.append(mutant.name)
                print(
                    f"{'SURVIVES' if lives else 'killed':9} {time.monotonic() - begin:4.0f} s  {mutant.name}",
                    flush=True,
                )
            except ValueError as error:
                errors.append(str(error))
                print(f"ERROR     {error}", flush=True)
            finally:
                free.put(root)

        with ThreadPoolExecutor(given.processes) as pool:
            list(pool.map(attempt, chosen))
    killed = len(chosen) - len(survivors) - len(errors)
    print(json.dumps({"mutants": len(chosen), "killed": killed, "survivors": survivors, "errors": len(errors)}))
    return 1 if survivors or errors else 0


if __name__ == "__main__":
    sys.exit(main())
