"""GSM8K and MATH as they are published, turned into JSONL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridengine.data.prepare import last_boxed, main

GSM8K = [
    {"question": "Ann has 3 bags of 400 beans. How many beans?", "answer": "3*400 = <<3*400=1200>>1200\n#### 1,200"},
    {"question": "Bob walks 5 km and back. How far?", "answer": "5+5 = 10\n#### 10"},
]
MATH = [
    {"problem": "Half of one?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
    {"problem": "First 1, then?", "solution": "\\boxed{1}, no: \\boxed{2}", "level": "Level 5", "type": "Algebra"},
]


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{2\sqrt{2}}", r"2\sqrt{2}"),
        (r"\boxed{1} and \fbox{2}", "2"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{1} then \boxed{2", "1"),
        ("no box", None),
        (r"\boxed{ 3 }", "3"),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize("layout", ["hub", "authors"])
def test_gsm8k(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    if layout == "hub":
        parquet(source / "main" / "train-00000-of-00001.parquet", GSM8K)
        parquet(source / "main" / "test-00000-of-00001.parquet", GSM8K[:1])
        parquet(source / "socratic" / "train-00000-of-00001.parquet", [{"question": "x", "answer": "other"}])
    else:
        source.mkdir()
        (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
        (source / "test.jsonl").write_text(json.dumps(GSM8K[0]) + "\n")
        (source / "train_socratic.jsonl").write_text('{"question": "x", "answer": "other"}\n')
    assert main(["gsm8k", "--source", str(source), "--out", str(out)]) == 0
    rows = jsonl(out / "train.jsonl")
    assert [row["answer"] for row in rows] == ["1200", "10"]
    assert rows[0]["prompt"].startswith("Ann has 3 bags") and rows[0]["prompt"].endswith("into \\boxed{}.")
    assert [row["data_source"] for row in jsonl(out / "test.jsonl")] == ["gsm8k"]
    assert f"data.train={out / 'train.jsonl'}" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["hub", "authors"])
def test_math(tmp_path: Path, layout: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    if layout == "hub":
        parquet(source / "data" / "train-00000-of-00001.parquet", MATH)
        parquet(source / "data" / "test-00000-of-00001.parquet", MATH[:1])
    else:
        for number, row in enumerate(MATH):
            for split in ("train", "test"):
                path = source / split / "algebra" / f"{number}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(row))
    assert main(["math", "--source", str(source), "--out", str(out), "--instruction", ""]) == 0
    first, second = jsonl(out / "train.jsonl")
    assert first == {
        "prompt": "Half of one?", "answer": "\\frac{1}{2}", "data_source": "math", "level": "Level 1",
        "subject": "Algebra",
    }  # fmt: skip
    assert second["answer"] == "2" and (out / "test.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "x", "answer": "five"}, "train.jsonl:1: column 'answer' has no '####'"),
        ("gsm8k", {"problem": "x"}, "train.jsonl:1: no text in column 'question'; the row has problem"),
        ("math", {"problem": "x", "solution": "y"}, "train.jsonl:1: column 'solution' has no \\boxed"),
    ],
)
def test_what_is_not_as_published_is_named(
    tmp_path: Path, name: str, row: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert main([name, "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_what_it_takes() -> None:
    done = subprocess.run([sys.executable, "-m", "hybridengine.data", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--source" in done.stdout and "gsm8k" in done.stdout
