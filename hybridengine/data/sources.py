"""Where rows come from: JSONL, parquet, saved Hugging Face datasets, and procedural tasks.

A row is a plain dict. Which of them train and which validate is decided here, and never depends on the run's
seed: runs with different seeds are measured on the same validation set and none has trained on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.config import DataConfig
from hybridengine.data import arithmetic

Row = dict[str, Any]

SPLIT_SEED = 20240607  # of everything that has to be the same in every run
FORMS = "file.jsonl, file.parquet, a saved datasets directory, reasoning_gym:<task> or arithmetic"
HELD_OUT_AT_MOST = 4  # validation takes no more than one row in so many


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of both sides, and what there is to say about how they came about."""

    train: list[Row]
    validation: list[Row]
    notes: list[str] = field(default_factory=list)


def read(config: DataConfig, seed: int) -> Rows:
    """Read ``data.train`` and ``data.validation``; without the latter, hold rows out of the former.

    Raises:
        ValueError: no such source, unreadable, empty, or options that it does not take.
    """
    notes: list[str] = []
    train, own_validation = _read_train(config, seed)
    if config.validation_size == 0:
        validation: list[Row] = []
    elif config.validation is not None:
        validation = _sample(_read_validation(config), config.validation_size)
    elif own_validation is not None:
        validation = _sample(own_validation, config.validation_size)
    else:
        train, validation = _hold_out(train, min(config.validation_size, len(train) // HELD_OUT_AT_MOST))
        notes.append(f"data.validation: {len(validation)} rows held out of data.train={config.train}")
    if validation and _is_procedural(config.train) and _is_procedural(config.validation or config.train):
        train, validation = _disentangle(train, validation, notes)
    if not train:
        raise ValueError(
            f"data.train={config.train}: no rows left to train on; lower data.validation_size={config.validation_size} "
            "or choose a larger task"
        )
    return Rows(train=train, validation=validation, notes=notes)


def _read_train(config: DataConfig, seed: int) -> tuple[list[Row], list[Row] | None]:
    """Training rows and, where the source itself says which they are, the validation rows."""
    source = config.train
    if config.kwargs and not source.startswith("reasoning_gym:"):
        raise ValueError(f"data.kwargs={config.kwargs}: data.train={source} takes no options")
    if source == "arithmetic":
        rows = [arithmetic.row(a, b) for a, b in arithmetic.problems(held_out=False)]
        return random.Random(f"{seed}/arithmetic").sample(rows, min(config.size, len(rows))), _arithmetic_held_out()
    if source.startswith("reasoning_gym:"):
        return (
            _reasoning_gym(source, config, size=config.size, seed=_procedural_seed("train", seed)),
            _reasoning_gym(source, config, size=config.validation_size, seed=_procedural_seed("validation", 0)),
        )
    splits = _read_stored(source, "data.train")
    if "train" not in splits:
        raise ValueError(f"data.train={source}: no split 'train', it has {', '.join(splits)}")
    return splits["train"], splits.get("validation", splits.get("test"))


def _read_validation(config: DataConfig) -> list[Row]:
    source = config.validation
    assert source is not None
    if source == "arithmetic":
        return _arithmetic_held_out()
    if source.startswith("reasoning_gym:"):
        return _reasoning_gym(
            source, config, size=config.validation_size, seed=_procedural_seed("validation", 0), key="data.validation"
        )
    splits = _read_stored(source, "data.validation")
    for name in ("validation", "test", "train"):
        if name in splits and (name != "train" or len(splits) == 1):
            return splits[name]
    raise ValueError(f"data.validation={source}: no split 'validation' or 'test', it has {', '.join(splits)}")


def _sample(rows: list[Row], size: int) -> list[Row]:
    """``size`` of the rows, in their order; always the same ones."""
    if len(rows) <= size:
        return rows
    return [rows[i] for i in sorted(random.Random(SPLIT_SEED).sample(range(len(rows)), size))]


def _hold_out(rows: list[Row], size: int) -> tuple[list[Row], list[Row]]:
    chosen = set(random.Random(SPLIT_SEED).sample(range(len(rows)), size))
    return (
        [row for i, row in enumerate(rows) if i not in chosen],
        [row for i, row in enumerate(rows) if i in chosen],
    )


def _disentangle(train: list[Row], validation: list[Row], notes: list[str]) -> tuple[list[Row], list[Row]]:
    """Generators repeat themselves where a task is small: no validation row twice, none in training."""
    known = {_identity(row): row for row in reversed(validation)}
    unique = [row for row in validation if known[_identity(row)] is row]
    kept = [row for row in train if _identity(row) not in known]
    if len(unique) < len(validation):
        notes.append(f"data.validation: {len(validation) - len(unique)} of {len(validation)} rows left out, repeated")
    if len(kept) < len(train):
        notes.append(f"data.train: {len(train) - len(kept)} of {len(train)} rows left out, they are validation rows")
    return kept, unique


def _identity(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


# -- procedural ----------------------------------------------------------------------------------------


def _is_procedural(source: str) -> bool:
    return source == "arithmetic" or source.startswith("reasoning_gym:")


def _procedural_seed(side: str, seed: int) -> int:
    return random.Random(f"{side}/{seed}").getrandbits(31)


def _arithmetic_held_out() -> list[Row]:
    return [arithmetic.row(a, b) for a, b in arithmetic.problems(held_out=True)]


def _reasoning_gym(source: str, config: DataConfig, *, size: int, seed: int, key: str = "data.train") -> list[Row]:
    """Columns prompt, answer, and what the task's own scorer needs to see again: task, kwargs, entry."""
    if size == 0:
        return []
    task = source.removeprefix("reasoning_gym:")
    dataset = make_reasoning_gym(task, {**config.kwargs, "size": size, "seed": seed}, origin=f"{key}={source}")
    rows = []
    for entry in (dataset[i] for i in range(size)):
        rows.append(
            {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "task": task,
                "kwargs": dict(config.kwargs),
                "entry": entry,
            }
        )
    return rows


def make_reasoning_gym(task: str, kwargs: dict[str, Any], *, origin: str) -> Any:
    """A reasoning-gym dataset.

    Raises:
        ValueError: reasoning-gym is missing, or refuses the task or an option; names ``origin``.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise ValueError(f"{origin}: needs the package reasoning-gym (pip install reasoning-gym)") from None
    if task not in DATASETS:
        import difflib

        close = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:3]
        raise ValueError(f"{origin}: reasoning-gym has no task {task!r}; close names: {', '.join(close)}")
    try:
        return create_dataset(task, **kwargs)
    except (TypeError, AssertionError, ValueError) as error:
        import dataclasses

        names = sorted({field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"})
        raise ValueError(
            f"{origin}: data.kwargs refused by the task ({error}); it knows {', '.join(names)} "
            "(the number of rows is data.size)"
        ) from None


# -- stored --------------------------------------------------------------------------------------------


def _read_stored(source: str, key: str) -> dict[str, list[Row]]:
    """Split name -> rows. A single file is one split, 'train'."""
    path = Path(source).expanduser()
    readers: dict[str, Callable[[Path], Iterable[Row]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_jsonl,
        ".parquet": _read_parquet,
    }
    if not path.exists():
        raise ValueError(f"{key}={source}: no such file or directory; give {FORMS}")
    if path.is_dir():
        splits = _read_saved_datasets(path, key)
    elif path.suffix in readers:
        splits = {"train": list(readers[path.suffix](path))}
    else:
        raise ValueError(f"{key}={source}: can't tell what kind of file this is; give {FORMS}")
    for name, rows in splits.items():
        if not rows and name == "train":
            raise ValueError(f"{key}={source}: the data set is empty")
    return splits


def _read_jsonl(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a JSON {type(row).__name__}, expected one object per line")
            yield row


def _read_parquet(path: Path) -> Iterable[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from None


def _read_saved_datasets(path: Path, key: str) -> dict[str, list[Row]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise ValueError(
            f"{key}={path}: not a directory written by datasets' save_to_disk; for files of your own give "
            "the .jsonl or .parquet file itself"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        return {str(name): list(split) for name, split in loaded.items()}
    return {"train": list(loaded)}
