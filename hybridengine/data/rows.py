"""A row of data and the place it came from, and columns that are named by a dotted path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Names that other programs use for the ground truth: suggested where ``data.answer_key`` names no column.
ANSWER_NAMES = ("ground_truth", "solution", "answer", "final_answer", "target", "reference", "label")
PROMPT_NAMES = ("prompt", "question", "problem", "query", "instruction", "messages", "input")


class _Absent:
    """The value of a column that a row does not have; null is a value."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        columns: column name to value.
        where: the place for error messages, such as ``train.jsonl:21`` or ``a.parquet, row 20`` (counted from 0).
    """

    columns: dict[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value of column ``key``, or of the dotted path ``key`` through nested columns; ABSENT without one.

        >>> row = Row({"reward_model": {"ground_truth": "72"}, "a.b": 1}, "x.jsonl:1")
        >>> row.get("reward_model.ground_truth"), row.get("a.b"), row.get("reward_model.style")
        ('72', 1, absent)
        """
        if key in self.columns:
            return self.columns[key]
        node: Any = self.columns
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return ABSENT
            node = node[part]
        return node

    def identity(self, key: str) -> str:
        """Text that is equal for rows with equal ``key`` columns."""
        return json.dumps(self.get(key), sort_keys=True, default=repr)


def columns_of(rows: Iterable[Row]) -> list[str]:
    """All columns of these rows, nested ones by their dotted paths, in alphabetical order."""
    return sorted({path for row in rows for path in _paths(row.columns)})


def suggestion(columns: Iterable[str], names: Iterable[str]) -> str | None:
    """The column whose last part is the first of ``names`` that occurs."""
    by_name = {path.rsplit(".", 1)[-1]: path for path in sorted(columns, reverse=True)}
    return next((by_name[name] for name in names if name in by_name), None)


def _paths(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
