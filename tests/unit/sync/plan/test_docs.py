"""docs/resharding.md shows what the planner computes now, and its example runs."""

from __future__ import annotations

import doctest
import importlib
import runpy

import pytest

from tests import ROOT


def test_figures_are_current() -> None:
    figures = runpy.run_path(str(ROOT / "scripts" / "resharding_figures.py"))
    text = (ROOT / "docs" / "resharding.md").read_text()
    assert figures["table"]() in text, "run scripts/resharding_figures.py and put its table into docs/resharding.md"
    assert figures["picture"]() == (ROOT / "docs" / "resharding.svg").read_text()


@pytest.mark.parametrize("name", ["boxes", "strided", "layouts", "plan", "bake", "nesting"])
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"hybridengine.sync.plan.{name}"))
    assert results.attempted > 0 and results.failed == 0


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = (ROOT / "docs" / "resharding.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(example, "docs/resharding.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "nested order, best dimensions (5.71 GB received per rank and sync)" in printed
    assert "receives 5.712 GB (minimum 5.712)" in printed and "57% saved" in printed
