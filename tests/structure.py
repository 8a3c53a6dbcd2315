"""``python -m tests.structure``: sizes, arrows between packages, what a new algorithm touches. JSON comes last.

``make structure`` runs it; tests/unit/test_structure.py holds what it measures to bounds.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridengine"
#: From the bottom up: each package imports what is before it only. A package that is not named is its directory's.
ORDER = (
    "types", "process_control", "config", "sampling", "plugins", "distributed/errors", "distributed/links", "tracing",
    "sync/plan", "models", "native", "platform", "distributed", "memory", "sync/transfer", "engines", "sync",
    "algorithms", "data", "rewards", "monitors", "embedded", "mismatch", "schedule", "placement", "checkpoint",
    "report", "failure", "interrupt", "parity", "loop", "final_report", "validate", "simulate", "assemble", "tools",
    "train", "doctor", "export", "evaluate", "compare", "cli",
)  # fmt: skip
#: Modules that are parts of another package's job.
SAME = {"native_cuda": "native", "native_build": "native", "hybridengine": "types"}
DEVICE_CHECK = re.compile(r"\bis_cuda\b|\.type [!=]= \"(?:cuda|cpu)\"|torch\.cuda\.is_available\(\)")


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted names, without the package's own, and their files."""
    named = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "hybridengine"] = file
    return named


def package_of(module: str) -> str:
    """The entry of ORDER that a module belongs to: the longest that fits, else its first name."""
    path = module.replace(".", "/")
    fitting = [name for name in ORDER if path == name or path.startswith(name + "/")]
    first = path.split("/")[0]
    return SAME.get(first) or max(fitting, key=len, default=first)


def arrows() -> dict[tuple[str, str], list[str]]:
    """Which package imports which, and where; imports inside of functions count, imports for types alone as well."""
    known = modules()
    found: dict[tuple[str, str], list[str]] = {}
    for module, file in known.items():
        for node in ast.walk(ast.parse(file.read_text())):
            for target in _imported(node, known):
                here, there = package_of(module), package_of(target)
                if here != there:
                    found.setdefault((here, there), []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def _imported(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and (node.module + ".").startswith("hybridengine."):
        base = node.module.removeprefix("hybridengine").lstrip(".")
        for alias in node.names:
            inner = f"{base}.{alias.name}".lstrip(".")
            yield inner if inner in known else base or "hybridengine"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if (alias.name + ".").startswith("hybridengine."):
                yield alias.name.removeprefix("hybridengine").lstrip(".") or "hybridengine"


def back_arrows() -> list[str]:
    """Imports of what is higher up, or of what has no place in the order."""
    place = {name: i for i, name in enumerate(ORDER)}
    wrong = []
    for (here, there), where in sorted(arrows().items()):
        if here not in place or there not in place or place[there] > place[here]:
            wrong.append(f"{here} imports {there}: {', '.join(where)}")
    return wrong


def cycles() -> list[list[str]]:
    """Groups of packages that reach each other."""
    towards: dict[str, set[str]] = {}
    for here, there in arrows():
        towards.setdefault(here, set()).add(there)

    def reached(start: str) -> set[str]:
        seen, front = set[str](), [start]
        while front:
            for following in towards.get(front.pop(), set()) - seen:
                seen.add(following)
                front.append(following)
        return seen

    everything = {name: reached(name) for name in towards}
    groups = {tuple(sorted(b for b in everything if b in everything[a] and a in everything[b])) for a in everything}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def functions() -> Iterator[tuple[int, str]]:
    """(lines, place) of every function."""
    for file in modules().values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{file.relative_to(ROOT)}:{node.name}"


def sizes() -> Iterator[tuple[int, str]]:
    """(lines, place) of every file."""
    for file in modules().values():
        yield len(file.read_text().splitlines()), str(file.relative_to(ROOT))


def any_annotations() -> int:
    """Names ``Any`` in annotations of parameters, results and attributes."""
    count = 0
    for file in modules().values():
        for node in ast.walk(ast.parse(file.read_text())):
            annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
            for annotation in filter(None, annotations):
                count += sum(isinstance(part, ast.Name) and part.id == "Any" for part in ast.walk(annotation))
    return count


def device_checks() -> list[str]:
    """Questions about the kind of device outside of platform/ and of the modules that serve one kind alone."""
    return [
        f"{file.relative_to(ROOT)}:{number}"
        for module, file in modules().items()
        if package_of(module) not in ("platform", "native") and file.name not in ("cpu.py", "cuda.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if DEVICE_CHECK.search(line)
    ]


def files_of_algorithm(name: str) -> list[str]:
    """Files of the package and of conf/ that name an algorithm: what a new one has to touch."""
    mention = re.compile(rf"[^\w]{name}[^\w]", re.IGNORECASE)
    spread = [*PACKAGE.rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    return sorted(str(f.relative_to(ROOT)) for f in spread if f.stem == name or mention.search(f.read_text()))


@functools.cache
def frames_to_copy() -> list[str]:
    """Functions from the loop's step to the one that runs the copies, the shortest of those that a real step takes."""
    command = [sys.executable, "-m", "tests.structure", "--trace-a-step"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shortest: list[str] = json.loads(done.stdout.splitlines()[-1])
    return shortest


def trace_a_step() -> None:
    """Train for a step, and print the calls that lead to the copies as JSON."""
    from hybridengine import native
    from hybridengine.train import main as train
    from tests.e2e.runs import SMALL

    run_boxes, stacks = native.run_boxes, []

    def traced(*arguments: Any, **options: Any) -> None:
        stack = [frame for frame in traceback.extract_stack()[:-1] if str(PACKAGE) in frame.filename]
        names = [f"{Path(frame.filename).relative_to(PACKAGE)}:{frame.name}" for frame in stack]
        if "loop.py:train_step" in names:
            stacks.append(names[names.index("loop.py:train_step") + 1 :])
        run_boxes(*arguments, **options)

    native.run_boxes = traced
    with tempfile.TemporaryDirectory() as scratch:
        job = ["rollout=transformers", "rollout.tp=1", "steps=1", "sync.method=pull", f"output_dir={scratch}"]
        if status := train([*SMALL, *job]):
            raise SystemExit(status)
    print(json.dumps(min(stacks, key=len)))


def measure() -> dict[str, int]:
    lines = list(sizes())
    texts = [file.read_text() for file in modules().values()]
    return {
        "package_lines": sum(count for count, _ in lines),
        "files": len(lines),
        "largest_file": max(lines)[0],
        "longest_function": max(functions())[0],
        "frames_to_copy": len(frames_to_copy()),
        "back_arrows": len(back_arrows()),
        "cycles": len(cycles()),
        "device_checks_outside_platform": len(device_checks()),
        "any_annotations": any_annotations(),
        "type_ignores": sum(text.count("type: ignore") for text in texts),
        "files_touched_by_new_algorithm": len(files_of_algorithm("cispo")),
    }


def main() -> int:
    if sys.argv[1:] == ["--trace-a-step"]:
        trace_a_step()
        return 0
    print("largest files:", *(f"{count:5}  {place}" for count, place in sorted(sizes())[:-6:-1]), sep="\n  ")
    print("longest functions:", *(f"{count:5}  {place}" for count, place in sorted(functions())[:-6:-1]), sep="\n  ")
    print("from the step to the copy:", *frames_to_copy(), sep="\n  ")
    print("a new algorithm:", *files_of_algorithm("cispo"), sep="\n  ")
    for title, entries in (("against the order", back_arrows()), ("cycles", cycles()), ("devices", device_checks())):
        if entries:
            print(f"{title}:", *entries, sep="\n  ")
    print(json.dumps(measure()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
