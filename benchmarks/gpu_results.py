"""Dated result files of what runs on a GPU: docs/results/<name>-<date>.md for people, .json beside it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check or benchmark.

    Attributes:
        status: "pass", "fail" or "not run".
        note: what was found, in words.
        figures: what was measured, for programs.
    """

    name: str
    what: str
    status: str
    seconds: float
    note: str
    figures: dict[str, Any] = field(default_factory=dict)
    commit: str = ""


def write(
    directory: Path,
    name: str,
    date: datetime.date,
    rows: Sequence[Row],
    conditions: Mapping[str, Any],
    *,
    order: Sequence[str],
) -> Path:
    """Both files, with what the same day's file of the same device says of other checks.

    Args:
        conditions: ``device``, ``commit`` and ``versions`` at least.
        order: names of all checks, in the table's order.
    Returns:
        the path for people.
    """
    path = directory / f"{name}-{date.isoformat()}.json"
    known: dict[str, dict[str, Any]] = {}
    if path.exists() and (earlier := json.loads(path.read_text()))["conditions"]["device"] == conditions["device"]:
        known = {row["name"]: row for row in earlier["rows"]}
    for row in rows:
        if row.status == "not run" and row.name in known:
            continue  # what was found before says more
        known[row.name] = asdict(row) | {"commit": str(conditions.get("commit") or "")}
    found = [Row(**known[name]) for name in order if name in known]
    directory.mkdir(parents=True, exist_ok=True)
    content = {"conditions": dict(conditions), "rows": [asdict(row) for row in found]}
    _replace(path, json.dumps(content, indent=1) + "\n")
    page = path.with_suffix(".md")
    _replace(page, markdown(name, date, found, conditions))
    return page


def markdown(name: str, date: datetime.date, rows: Sequence[Row], conditions: Mapping[str, Any]) -> str:
    """The page: conditions, then a line per check."""
    packages = ", ".join(f"{package} {version}" for package, version in conditions["versions"].items())
    passed = sum(row.status == "pass" for row in rows)
    lines = [
        f"# {name}, {date.isoformat()}", "",
        f"{conditions['device']}; {packages}. Written by `make {name}`: {passed} of {len(rows)} passed.", "",
        "| check | what runs | | seconds | found | commit |", "|---|---|---|---:|---|---|",
    ]  # fmt: skip
    for row in rows:
        note, commit = row.note.replace("|", "\\|").replace("\n", " "), row.commit[:9]
        lines.append(f"| {row.name} | {row.what} | {row.status} | {row.seconds:.1f} | {note} | {commit} |")
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
