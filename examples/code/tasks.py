"""Small programming tasks in the manner of MBPP: a sentence that asks for a function, and calls with their results.

    python examples/code/tasks.py DIRECTORY            # writes train.jsonl and validation.jsonl

Each family is a sentence with numbers in it and the Python that does what it says. Training and validation share the
families and none of the sentences. The answer of a row is what ``reward=code`` reads: the name of the function and its
test cases. No case's result is the same as its argument's, so that handing the argument back passes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20261130
CASES = 4


@dataclass(frozen=True, slots=True)
class Family:
    """``text`` and ``solve`` take what ``numbers`` draws; ``argument`` draws what the function is called with."""

    text: str
    numbers: Callable[[random.Random], tuple[int, ...]]
    argument: Callable[[random.Random], tuple[Any, ...]]
    solve: Callable[..., Any]


def small(count: int) -> Callable[[random.Random], tuple[int, ...]]:
    return lambda drawn: tuple(drawn.randint(2, 30) for _ in range(count))


def one(drawn: random.Random) -> tuple[int]:
    return (drawn.randint(-50, 50),)


def two(drawn: random.Random) -> tuple[int, int]:
    return drawn.randint(-50, 50), drawn.randint(-50, 50)


def numbers_list(drawn: random.Random) -> tuple[list[int]]:
    return ([drawn.randint(-50, 50) for _ in range(drawn.randint(2, 6))],)


def word(drawn: random.Random) -> tuple[str]:
    return ("".join(drawn.choice("abcdeno") for _ in range(drawn.randint(2, 8))),)


FAMILIES = [
    Family("returns {0} times x", small(1), one, lambda n, x: n * x),
    Family("returns x plus {0}", small(1), one, lambda n, x: x + n),
    Family("returns {0} minus x", small(1), one, lambda n, x: n - x),
    Family("returns {0} times x plus {1}", small(2), one, lambda n, m, x: n * x + m),
    Family("returns x squared plus {0}", small(1), one, lambda n, x: x * x + n),
    Family("returns the remainder of x divided by {0}", small(1), one, lambda n, x: x % n),
    Family("returns whether x is greater than {0}", small(1), one, lambda n, x: x > n),
    Family("returns the sum of x and y plus {0}", small(1), two, lambda n, x, y: x + y + n),
    Family("returns {0} times x minus y", small(1), two, lambda n, x, y: n * x - y),
    Family("returns the larger of x and y times {0}", small(1), two, lambda n, x, y: max(x, y) * n),
    Family("returns the sum of the list x plus {0}", small(1), numbers_list, lambda n, x: sum(x) + n),
    Family("returns the maximum of the list x minus {0}", small(1), numbers_list, lambda n, x: max(x) - n),
    Family("returns the length of the list x times {0}", small(1), numbers_list, lambda n, x: len(x) * n),
    Family("returns the list of all elements of x times {0}", small(1), numbers_list, lambda n, x: [n * v for v in x]),
    Family("returns the string x repeated {0} times", small(1), word, lambda n, x: x * n),
    Family("returns the length of the string x plus {0}", small(1), word, lambda n, x: len(x) + n),
]


def row(family: Family, numbers: tuple[int, ...], drawn: random.Random) -> dict[str, Any]:
    """One task: its prompt, and the answer as JSON text."""
    cases = []
    while len(cases) < CASES:
        args = family.argument(drawn)
        expected = family.solve(*numbers, *args)
        if expected != args[0]:
            cases.append({"args": list(args), "expected": expected})
    parameters = "x, y" if family.argument is two else "x"
    text = f"Write a Python function f({parameters}) that {family.text.format(*numbers)}."
    return {"prompt": text, "answer": json.dumps({"entry_point": "f", "tests": cases})}


def make(train: int, validation: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of both sides, every family in turn; no sentence twice."""
    drawn = random.Random(SEED)
    found: dict[str, dict[str, Any]] = {}
    turn = barren = 0
    while len(found) < train + validation:
        family = FAMILIES[turn % len(FAMILIES)]
        made = row(family, family.numbers(drawn), drawn)
        turn += 1
        barren = barren + 1 if made["prompt"] in found else 0
        if barren > 100 * len(FAMILIES):
            raise ValueError(f"only {len(found)} different tasks; ask for fewer than {train + validation}")
        found.setdefault(made["prompt"], made)
    rows = list(found.values())
    return rows[validation:], rows[:validation]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--validation", type=int, default=96)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "validation"), make(arguments.train, arguments.validation), strict=True):
        path = arguments.directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(made) + "\n" for made in rows))
        print(f"{path}: {len(rows)} tasks")


if __name__ == "__main__":
    main()
