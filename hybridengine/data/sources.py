"""Which rows train and which validate: stored ones, and those of procedural tasks.

That is decided here and never depends on the run's seed: runs with different seeds are measured on the same
validation set and none has trained on it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config import DataConfig
from hybridengine.data import arithmetic
from hybridengine.data.files import FORMS, read_stored
from hybridengine.data.rows import Row

SPLIT_SEED = 20240607  # of everything that has to be the same in every run
HELD_OUT_AT_MOST = 4  # validation takes no more than one row in so many


@dataclass(slots=True, kw_only=True)
class Rows:
    """Training and validation rows, and notes for the log on how they were chosen."""

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
    held_out = config.validation is None
    if config.validation_size == 0:
        validation: list[Row] = []
    elif config.validation is not None:
        validation = _sample(_read_validation(config), config.validation_size)
    elif own_validation is not None:
        held_out = _procedural(config.train) is not None
        validation = _sample(own_validation, config.validation_size)
    else:
        train, validation = _hold_out(train, min(config.validation_size, len(train) // HELD_OUT_AT_MOST))
        notes.append(f"data.validation: {len(validation)} rows held out of data.train={in_words(config.train)}")
    generated = _procedural(config.train) and _procedural(config.validation or config.train)
    if validation and (held_out or generated):
        train, validation = _disentangle(train, validation, config.prompt_key, notes)
    else:
        _report_overlap(train, validation, config.prompt_key, notes)
    if not train:
        raise ValueError(
            f"data.train={in_words(config.train)}: no rows left to train on; lower "
            f"data.validation_size={config.validation_size} or choose a larger task"
        )
    return Rows(train=train, validation=validation, notes=notes)


def in_words(value: str | Sequence[str]) -> str:
    """A source or several, for messages."""
    return value if isinstance(value, str) else ", ".join(value)


def _listed(value: str | Sequence[str], key: str) -> list[str]:
    """Stored sources. Raises ValueError where a procedural one stands among them, or there is none."""
    sources = [value] if isinstance(value, str) else list(value)
    if not sources:
        raise ValueError(f"{key}=[]: no source; give {FORMS}")
    for source in sources:
        if _procedural(source):
            raise ValueError(f"{key}={in_words(value)}: {source} can't be one of several sources")
    return sources


def _read_train(config: DataConfig, seed: int) -> tuple[list[Row], list[Row] | None]:
    """Training rows and, where the source itself says which they are, the validation rows."""
    source = _procedural(config.train)
    if config.kwargs and (source is None or source == "arithmetic"):
        raise ValueError(f"data.kwargs={config.kwargs}: data.train={in_words(config.train)} takes no options")
    if source == "arithmetic":
        rows = _arithmetic_rows(held_out=False)
        drawn = random.Random(f"{seed}/arithmetic").sample(rows, min(config.size, len(rows)))
        return drawn, _arithmetic_rows(held_out=True)
    if source is not None:
        return (
            _reasoning_gym(source, config, size=config.size, seed=_procedural_seed("train", seed)),
            _reasoning_gym(source, config, size=config.validation_size, seed=_procedural_seed("validation", 0)),
        )
    splits = read_stored(_listed(config.train, "data.train"), "data.train", subset=config.subset)
    if "train" not in splits:
        raise ValueError(f"data.train={in_words(config.train)}: no split 'train', it has {', '.join(splits)}")
    return splits["train"], splits.get("validation", splits.get("test"))


def _read_validation(config: DataConfig) -> list[Row]:
    assert config.validation is not None
    source = _procedural(config.validation)
    if source == "arithmetic":
        return _arithmetic_rows(held_out=True)
    if source is not None:
        return _reasoning_gym(
            source, config, size=config.validation_size, seed=_procedural_seed("validation", 0), key="data.validation"
        )
    splits = read_stored(_listed(config.validation, "data.validation"), "data.validation", subset=config.subset)
    for name in ("validation", "test", "train"):
        if name in splits and (name != "train" or len(splits) == 1):
            return splits[name]
    raise ValueError(
        f"data.validation={in_words(config.validation)}: no split 'validation' or 'test', it has {', '.join(splits)}"
    )


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


def _disentangle(train: list[Row], validation: list[Row], key: str, notes: list[str]) -> tuple[list[Row], list[Row]]:
    """Files and small tasks repeat prompts: no validation row twice, none of them in training."""
    known = {row.identity(key): row for row in reversed(validation)}
    unique = [row for row in validation if known[row.identity(key)] is row]
    kept = [row for row in train if row.identity(key) not in known]
    if len(unique) < len(validation):
        notes.append(f"data.validation: {len(validation) - len(unique)} of {len(validation)} rows left out, repeated")
    if len(kept) < len(train):
        notes.append(f"data.train: {len(train) - len(kept)} of {len(train)} rows left out, they are validation rows")
    return kept, unique


def _report_overlap(train: Sequence[Row], validation: Sequence[Row], key: str, notes: list[str]) -> None:
    """Note validation prompts that are also trained on; rows that the user names are kept as they are."""
    if not validation:
        return
    known = {row.identity(key) for row in train}
    if count := sum(row.identity(key) in known for row in validation):
        notes.append(f"data.validation: {count} of {len(validation)} prompts are in the training data, too")


# -- procedural ----------------------------------------------------------------------------------------


def _procedural(value: str | Sequence[str]) -> str | None:
    """The name of a procedural source; None for stored ones."""
    is_procedural = isinstance(value, str) and (value == "arithmetic" or value.startswith("reasoning_gym:"))
    return str(value) if is_procedural else None


def _procedural_seed(side: str, seed: int) -> int:
    return random.Random(f"{side}/{seed}").getrandbits(31)


def _arithmetic_rows(*, held_out: bool) -> list[Row]:
    return [Row(arithmetic.row(a, b), f"arithmetic, {a}+{b}") for a, b in arithmetic.problems(held_out=held_out)]


def _reasoning_gym(source: str, config: DataConfig, *, size: int, seed: int, key: str = "data.train") -> list[Row]:
    """Columns prompt, answer, and what the task's own scorer needs to see again: task, kwargs, entry."""
    if size == 0:
        return []
    task = source.removeprefix("reasoning_gym:")
    dataset = make_reasoning_gym(task, {**config.kwargs, "size": size, "seed": seed}, origin=f"{key}={source}")
    kwargs = dict(config.kwargs)
    return [
        Row(
            {"prompt": entry["question"], "answer": entry["answer"], "task": task, "kwargs": kwargs, "entry": entry},
            f"{source}, row {number}",
        )
        for number, entry in enumerate(dataset[i] for i in range(size))
    ]


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
