"""What is made of the outcomes of `make families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import FAMILIES, as_page, main, summarize

RIGHT: dict[str, Any] = {
    "outcome": "right", "largest": 2e-6, "sides": {"packed": 2e-6, "padded": 1e-6, "transformers": 1.5e-6},
}  # fmt: skip
REFUSED = {"outcome": "refused", "why": "model.path=/x: has no attention | at all\nmore"}


def test_the_worst_size_counts() -> None:
    wrong, crashed = {**RIGHT, "outcome": "wrong", "largest": 0.5}, {"outcome": "crashed", "why": "boom"}
    found = {
        "a": {1: RIGHT, 2: {**RIGHT, "largest": 3e-6}}, "b": {1: REFUSED}, "c": {1: RIGHT, 2: wrong},
        "d": {1: wrong, 2: crashed}, "e": {1: RIGHT, 2: REFUSED},
    }  # fmt: skip
    assert summarize(found) == {
        "right": ["a", "e"], "refused": ["b"], "wrong": ["c"], "crashed": ["d"],
        "largest": {"a": 3e-6, "c": 0.5, "d": 0.5, "e": 2e-6},
    }  # fmt: skip


def test_the_page_and_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = list(FAMILIES)[:3]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps({names[0]: {"1": REFUSED}, names[1]: {"1": REFUSED}, "gone": {"1": RIGHT}}))
    padded = {**RIGHT, "sides": {"padded": 1e-6, "transformers": 1e-6}}
    second.write_text(json.dumps({names[0]: {"1": RIGHT, "2": padded}, names[2]: {"1": {"outcome": "crashed", "why": "boom"}}}))  # fmt: skip  # noqa: E501
    page = tmp_path / "page.md"
    assert main(["--merge", str(first), str(second), "--write", str(page)]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["right"], summary["refused"], summary["crashed"]) == (names[:1], names[1:2], names[2:])
    text = page.read_text()
    assert f"| {names[0]} | 1 | 2.0e-06 | 1.0e-06 | 1.5e-06 |" in text
    assert f"| {names[0]} | 2 | padded instead | 1.0e-06 | 1.0e-06 |" in text
    assert f"| {names[1]} | has no attention \\| at all |" in text and "## Crashed" in text
    assert "## Wrong" not in as_page({names[0]: {1: RIGHT}})
