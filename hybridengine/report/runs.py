"""A run's directory seen from outside: its configuration and its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config.schema import ConfigError


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One complete checkpoint: its directory, the step it was taken after, and the run's configuration then."""

    path: Path
    step: int
    config: dict[str, Any]


def checkpoints_of(run: Path) -> list[SavedCheckpoint]:
    """The complete checkpoints of a run, by step."""
    found = []
    for meta in (run / "checkpoints").glob("step_*/meta.json"):
        if meta.parent.suffix == "":
            content = json.loads(meta.read_text())
            found.append(SavedCheckpoint(meta.parent, int(content["step"]), content.get("config") or {}))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def choose_checkpoint(place: Path, *, step: int | None = None, best: bool = False) -> SavedCheckpoint:
    """A run's checkpoint: the newest, the one after ``step``, or the best; or ``place`` itself where it is one.

    Raises:
        ConfigError: there is none of the kind; the message lists those there are.
    """
    if (place / "meta.json").is_file():
        run, wanted = place.parent.parent, place
    else:
        run, wanted = place, None
    found = checkpoints_of(run)
    if not found:
        raise ConfigError(f"{place}: no checkpoints; give a run's directory, or one of its checkpoints/step_*")
    listed = f"it has those after step {', '.join(str(checkpoint.step) for checkpoint in found)}"
    if wanted is not None:
        return next(checkpoint for checkpoint in found if checkpoint.path == wanted)
    if best:
        record = best_of(run)
        if record is None:
            raise ConfigError(f"{place}: no best checkpoint; the run had no checkpoint.best; {listed}")
        step = int(record["step"])
    if step is None:
        return newest(run, found)
    chosen = [checkpoint for checkpoint in found if checkpoint.step == step]
    if not chosen:
        raise ConfigError(f"{place}: no checkpoint after step {step}; {listed} (see checkpoint.keep)")
    return chosen[0]


def newest(run: Path, checkpoints: list[SavedCheckpoint]) -> SavedCheckpoint:
    """The one that ``latest`` names: a run that started over from an earlier step has its newest state there."""
    pointer = run / "checkpoints" / "latest"
    named = pointer.read_text().strip() if pointer.is_file() else ""
    return next((checkpoint for checkpoint in checkpoints if checkpoint.path.name == named), checkpoints[-1])


def best_of(run: Path) -> dict[str, Any] | None:
    """What ``checkpoint.best`` kept: step, metric and value."""
    path = run / "checkpoints" / "best.json"
    return json.loads(path.read_text()) if path.is_file() else None
