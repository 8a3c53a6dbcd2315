"""Rows of stored data: JSONL, JSON arrays, parquet, saved Hugging Face datasets, snapshots of Hub data sets.

Several files, or a pattern such as ``data/train-*.parquet``, are read one after the other, in alphabetical order of
a pattern's matches.
"""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridengine.data.rows import Row

FORMS = (
    "file.jsonl, file.json, file.parquet, a list or pattern of such files, a saved datasets directory, a Hub snapshot, "
    "reasoning_gym:<task> or arithmetic"
)

Splits = dict[str, list[Row]]  # name of a split -> its rows; what has no splits is one named "train"


def read_stored(sources: Sequence[str], key: str, *, subset: str | None = None) -> Splits:
    """Read files and directories.

    Args:
        key: the configuration key they come from, for messages.
        subset: of a Hub data set that has several.

    Raises:
        ValueError: naming the key and the file (and line) that can't be read.
    """
    splits: Splits = {}
    for source in sources:
        for path in _matches(source, key):
            for name, rows in _read(path, f"{key}={source}", subset).items():
                splits.setdefault(name, []).extend(rows)
    if "train" in splits and not splits["train"]:
        raise ValueError(f"{key}={', '.join(sources)}: the data set is empty")
    return splits


def _matches(source: str, key: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.exists():
        return [path]
    if not glob.has_magic(source):
        raise ValueError(f"{key}={source}: no such file or directory; give {FORMS}")
    found = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not found:
        raise ValueError(f"{key}={source}: no file matches this pattern")
    return found


def _read(path: Path, origin: str, subset: str | None) -> Splits:
    if path.is_dir():
        return _read_directory(path, origin, subset)
    if path.suffix not in READERS:
        raise ValueError(f"{origin}: can't tell what kind of file {path.name} is; give {FORMS}")
    return {"train": list(READERS[path.suffix](path))}


# -- files ---------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[Row]:
    """One object per line, or one array of objects; UTF-8, with or without a byte order mark, any line ends."""
    lines = [_decoded(line, path, number) for number, line in enumerate(path.open("rb"), start=1)]
    first = next((line.strip() for line in lines if line.strip()), "")
    # A first line that is an array of its own, before other lines, stands in a JSONL file by mistake.
    if first.startswith("[") and (_parsed(first) is None or _parsed("".join(lines)) is not None):
        yield from _array("".join(lines), path)
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON object ({error}){_whole_object(lines)}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a JSON {type(row).__name__}, expected one object per line")
        yield Row(row, f"{path}:{number}")


def _decoded(line: bytes, path: Path, number: int) -> str:
    if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path}: UTF-16, expected UTF-8; convert it: iconv -f utf-16 -t utf-8 OLD > NEW")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        text = line[max(0, error.start - 10) : error.start + 10].decode("latin-1").strip()
        raise ValueError(
            f"{path}:{number}: not UTF-8 (byte {line[error.start]:#04x}, position {error.start + 1}); if it is Latin-1 "
            f"({text!r} would be right there), convert it: iconv -f latin1 -t utf-8 OLD > NEW"
        ) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _array(text: str, path: Path) -> Iterator[Row]:
    try:
        elements = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not a JSON array ({error})") from None
    for number, row in enumerate(elements):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: a JSON {type(row).__name__}, expected an object")
        yield Row(row, f"{path}, row {number}")


def _whole_object(lines: Sequence[str]) -> str:
    """The error for a file that is one object over many lines."""
    whole = _parsed("".join(lines))
    if not isinstance(whole, dict):
        return ""
    return f"; the file is one object with {', '.join(whole)}, expected an array of rows or one row per line"


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None
    for number, row in enumerate(rows):
        yield Row(plain(row), f"{path}, row {number}")


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


# -- directories ---------------------------------------------------------------------------------------


def _read_directory(path: Path, origin: str, subset: str | None) -> Splits:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_datasets(path)
    snapshot = _newest_snapshot(path)
    return {
        name: [row for file in files for row in _read(file, origin, None)["train"]]
        for name, files in _split_files(snapshot, origin, subset).items()
    }


def _saved_datasets(path: Path) -> Splits:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    return {
        str(name): [Row(plain(dict(row)), f"{path}, split {name}, row {i}") for i, row in enumerate(split)]
        for name, split in splits.items()
    }


def _newest_snapshot(path: Path) -> Path:
    """Of a repository in the Hub's cache (``datasets--owner--name``): the revision that ``main`` names."""
    main = path / "refs" / "main"
    named = path / "snapshots" / main.read_text().strip() if main.is_file() else path
    return named if named.is_dir() else path


def _split_files(path: Path, origin: str, subset: str | None) -> dict[str, list[Path]]:
    """Which files belong to which split, by the data card or the files' names, as ``load_dataset`` has it."""
    if not any(file.suffix in READERS for pattern in ("*", "*/*") for file in path.glob(pattern)):
        raise ValueError(
            f"{origin}: neither written by datasets' save_to_disk nor a directory with .jsonl, .json or .parquet files"
        )
    from datasets import load_dataset_builder

    try:
        with tempfile.TemporaryDirectory() as scratch:
            files = load_dataset_builder(str(path), subset, cache_dir=scratch).config.data_files
    except Exception as error:  # noqa: BLE001  the library raises many kinds, all about this directory
        raise ValueError(f"{origin}: {_subsets(str(error)) or error}") from None
    if files is None:
        raise ValueError(f"{origin}: datasets finds no data files in it")
    return {str(name): [Path(file) for file in of_split] for name, of_split in files.items()}


def _subsets(message: str) -> str | None:
    """What to do about a data set of several subsets, from the library's own list of them."""
    _, found, rest = message.partition("vailable")
    if not found or "[" not in rest:
        return None
    names = [name.strip(" '\"") for name in rest[rest.index("[") + 1 : rest.index("]")].split(",")]
    return f"set data.subset to one of {' | '.join(names)}"


def plain(value: Any) -> Any:
    """A value of a table as JSON would have it: dates and times in ISO 8601, decimals and the like as text.

    A checkpoint holds the prompts under way, and is read back without running code, which leaves these kinds only.
    """
    if value is None or isinstance(value, (str, bool, int, float, bytes)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
