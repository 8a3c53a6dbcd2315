"""examples/code/tasks.py: its tasks are solved by what they ask for, and by nothing simpler."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hybridengine.rewards.code import code_reward
from hybridengine.rewards.code.sandbox import check_sandbox


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    try:
        check_sandbox("degraded")
    except ValueError as error:
        pytest.skip(f"needs a sandbox: {error}")
    path = Path(__file__).parents[2] / "examples" / "code" / "tasks.py"
    spec = importlib.util.spec_from_file_location("code_tasks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["code_tasks"] = module
    spec.loader.exec_module(module)
    return module


#: One program per family, in their order, with the numbers in the place of n and m.
SOLUTIONS = [
    "n * x", "x + n", "n - x", "n * x + m", "x ** 2 + n", "x % n", "x > n", "x + y + n", "n * x - y", "max(x, y) * n",
    "sum(x) + n", "max(x) - n", "len(x) * n", "[n * v for v in x]", "x * n", "len(x) + n",
]  # fmt: skip


def score(program: str, row: dict[str, str]) -> float:
    return code_reward(row["prompt"], program, row["answer"], metadata={}, sandbox="degraded")


def test_every_family_is_solved_by_what_it_says_and_not_by_another(tasks: ModuleType) -> None:
    import random

    assert len(SOLUTIONS) == len(tasks.FAMILIES)
    for i, family in enumerate(tasks.FAMILIES):
        numbers = (7, 5)[: len(family.numbers(random.Random(i)))]
        made = tasks.row(family, numbers, random.Random(i))
        parameters = "x, y" if "y" in SOLUTIONS[i] else "x"
        assert f"f({parameters})" in made["prompt"] and "7" in made["prompt"]
        wanted = f"n, m = 7, 5\ndef f({parameters}):\n    return {SOLUTIONS[i]}\n"
        assert score(wanted, made) == 1.0, made["prompt"]
        for other in ("x", "7", "None", SOLUTIONS[(i + 1) % len(SOLUTIONS)]):
            assert score(f"n, m = 7, 5\ndef f({parameters}):\n    return {other}\n", made) == 0.0, (
                made["prompt"],
                other,
            )


def test_no_task_is_on_both_sides(tasks: ModuleType) -> None:
    train, validation = tasks.make(100, 40)
    assert (len(train), len(validation)) == (100, 40)
    assert len({row["prompt"] for row in [*train, *validation]}) == 140
    assert tasks.make(100, 40) == (train, validation)
    with pytest.raises(ValueError, match="ask for fewer"):
        tasks.make(10**5, 0)
