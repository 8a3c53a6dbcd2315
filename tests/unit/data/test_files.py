"""Files and directories as people have them: encodings, arrays, lists, patterns, snapshots; what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.data.files import read_stored
from hybridengine.data.rows import Row, columns_of, suggestion

ROWS = [{"prompt": f"é {i}", "answer": str(i)} for i in range(4)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(*sources: object, subset: str | None = None) -> dict[str, list[dict[str, Any]]]:
    splits = read_stored([str(source) for source in sources], "data.train", subset=subset)
    return {name: [row.columns for row in rows] for name, rows in splits.items()}


CONTENTS = {
    "plain": ("a.jsonl", "\n".join(LINES).encode()),
    "byte-order-mark": ("a.jsonl", b"\xef\xbb\xbf" + "\n".join(LINES).encode()),
    "crlf": ("a.jsonl", "\r\n".join(LINES).encode() + b"\r\n"),
    "blank-lines": ("a.jsonl", "\n\n".join(LINES).encode()),
    "array": ("a.json", json.dumps(ROWS, indent=2).encode()),
    "array-on-one-line": ("a.jsonl", b"\n" + json.dumps(ROWS).encode()),
    "array-with-a-byte-order-mark": ("a.json", b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode()),
    "lines-in-a-json-file": ("a.json", "\n".join(LINES).encode()),
}


@pytest.mark.parametrize(("name", "content"), CONTENTS.values(), ids=CONTENTS.keys())
def test_ways_to_write_json(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == {"train": ROWS}


REFUSED = {
    "latin-1": (
        "a.jsonl",
        "\n".join(LINES).encode("latin-1"),
        r"a\.jsonl:1: not UTF-8 \(byte 0xe9, position 13\).*Latin-1",
    ),
    "utf-16": ("a.jsonl", "\n".join(LINES).encode("utf-16"), r"a\.jsonl: UTF-16, expected UTF-8"),
    "number-in-an-array": ("a.json", b'[{"prompt": "x"}, 3]', r"a\.json, row 1: a JSON int, expected an object"),
    "broken-array": ("a.json", b'[{"prompt": "x"},\n{"prompt":\n', r"a\.json:3: not a JSON array"),
    "one-object": ("a.json", b'{\n"version": 1,\n"data": []\n}', "the file is one object with version, data"),
    "second-line": ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \xff}\n', r"a\.jsonl:2: not UTF-8"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_lists_and_patterns(tmp_path: Path) -> None:
    for i, line in enumerate(LINES):
        (tmp_path / f"part-{i}.jsonl").write_text(line)
    write_parquet(tmp_path / "more.parquet", ROWS)
    assert read(tmp_path / "part-*.jsonl") == {"train": ROWS}
    assert read(tmp_path / "part-3.jsonl", tmp_path / "part-[01].jsonl") == {"train": [ROWS[3], ROWS[0], ROWS[1]]}
    assert read(tmp_path / "part-0.jsonl", tmp_path / "more.parquet") == {"train": [ROWS[0], *ROWS]}
    with pytest.raises(ValueError, match=r"nothing-\*\.jsonl: no file matches this pattern"):
        read(tmp_path / "nothing-*.jsonl")


def test_hub_snapshot(tmp_path: Path) -> None:
    """As the Hub's cache has it: files are links into blobs/, and refs/main names the snapshot."""
    repository = tmp_path / "datasets--someone--sums"
    snapshot = repository / "snapshots" / "abc123"
    for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
        blob = write_parquet(repository / "blobs" / split, rows)
        link = snapshot / "data" / f"{split}-00000-of-00001.parquet"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    expected = {"train": ROWS[:3], "test": ROWS[3:]}
    assert read(snapshot) == read(repository) == expected


CARD = """---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/*}]
- config_name: hard
  data_files: [{split: train, path: hard/*}]
---
"""


def test_subsets_of_a_hub_snapshot(tmp_path: Path) -> None:
    for name, rows in (("easy", ROWS[:2]), ("hard", ROWS[2:])):
        write_parquet(tmp_path / name / "rows.parquet", rows)
    (tmp_path / "README.md").write_text(CARD)
    assert read(tmp_path, subset="hard") == {"train": ROWS[2:]}
    for subset in (None, "medium"):
        with pytest.raises(ValueError, match=r"set data\.subset to one of easy \| hard"):
            read(tmp_path, subset=subset)


def test_a_directory_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"nor a directory with \.jsonl, \.json or \.parquet files"):
        read(tmp_path)


def test_nested_columns() -> None:
    row = Row({"prompt": "p", "reward_model": {"ground_truth": "72", "style": "rule"}, "a.b": 1}, "x:1")
    assert row.get("reward_model.ground_truth") == "72" and row.get("a.b") == 1
    assert repr(row.get("reward_model.score")) == repr(row.get("prompt.x")) == "absent"
    columns = columns_of([row])
    assert columns == ["a.b", "prompt", "reward_model.ground_truth", "reward_model.style"]
    assert suggestion(columns, ("ground_truth", "solution")) == "reward_model.ground_truth"
