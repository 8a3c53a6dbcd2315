"""Checks of an earlier run in output_dir, before anything starts, so that it is neither overwritten nor misread."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import Config, text_of
from hybridengine.config.schema import ConfigError, leaves
from hybridengine.validate.output_dir import free_name

#: Keys that a run can't change when it goes on: they decide the order of the data, the model's shape and what is in the
#: checkpoint.
FIXED = (
    "seed", "model.path", "model.tokenizer", "model.chat_template", "critic.path", "data.train",
    "data.validation", "data.validation_size", "data.subset", "data.size", "data.kwargs", "data.prompt_key",
    "data.answer_key", "data.system_prompt", "data.chat", "data.chat_template_kwargs", "data.max_prompt_tokens",
    "data.overlong", "data.shuffle",
)  # fmt: skip

#: Keys that say nothing about what is trained.
UNRELATED = ("name", "output_dir", "checkpoint.", "logging.", "distributed.")

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run's newest checkpoint.

    Attributes:
        path: the checkpoint's directory.
        step: steps trained by then.
        config: its configuration.
        total_steps: what it was to reach, where that is known.
    """

    path: Path
    step: int
    config: Mapping[str, Any]
    total_steps: int | None


def find_earlier_run(config: Config) -> EarlierRun | None:
    """The checkpoint that this run would go on from, by ``checkpoint.resume``; None where it starts afresh.

    Raises:
        ConfigError: ``checkpoint.resume`` names no checkpoint.
    """
    resume, output_dir = config.checkpoint.resume, Path(config.output_dir)
    if resume == "never":
        return None
    path = _newest(output_dir / "checkpoints") if resume == "auto" else Path(resume)
    if path is None:
        return None
    meta = _json(path / "meta.json")
    if meta is None:
        raise ConfigError(f"checkpoint.resume={resume}: no checkpoint; {_complete_ones(output_dir, path)}")
    summary = _json(output_dir / SUMMARY) if resume == "auto" else None
    saved = meta.get("config") or {}
    total = saved.get("steps") or (summary or {}).get("total_steps")
    return EarlierRun(path, int(meta["step"]), saved, None if total is None else int(total))


def check_earlier_run(config: Config) -> str | None:
    """Decide what becomes of the run that output_dir holds.

    Returns:
        what to say where there is nothing left to do, and nothing must be changed; None to go on.

    Raises:
        ConfigError: it is another run, or ``checkpoint.resume`` names no checkpoint.
    """
    found = find_earlier_run(config)
    if found is None:
        return None
    changed = list(_differences(found.config, config))
    fixed = [line for key, line in changed if key in FIXED]
    at = f"step {found.step}" + (f" of {found.total_steps}" if found.total_steps else "")
    if fixed:
        raise ConfigError(
            f"{found.path} is of another run ({at}): {'; '.join(fixed)}.\n  output_dir={free_name(config.output_dir)} "
            "gives this run a directory of its own; checkpoint.resume=never starts over, and replaces what is there"
        )
    same = not [key for key, _ in changed if not key.startswith(UNRELATED) and key not in ("steps", "epochs")]
    wanted = config.steps
    if wanted is None and same and dict(changed).get("epochs") is None:
        wanted = found.total_steps  # as many epochs of the same data
    if wanted is None or found.step < wanted:
        return None
    files = ", ".join(
        str(path) for name in ("report.html", "model") if (path := Path(config.output_dir) / name).exists()
    )
    return (
        f"{found.path} is at {at}, and steps={wanted}: nothing left to do"
        f"{f' (see {files})' if files else ''}.\n  steps={found.step + wanted} trains on; "
        f"output_dir={free_name(config.output_dir)} or checkpoint.resume=never starts afresh"
    )


def _differences(saved: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str]]:
    """(key, "key was X, now Y") for every key whose value changed; what the checkpoint doesn't know is left out."""
    now = dict(leaves(json.loads(json.dumps(dataclasses.asdict(config), default=str))))
    before = dict(leaves(saved))
    for key in now.keys() & before.keys():
        if now[key] != before[key]:
            yield key, f"{key} was {text_of(before[key])}, now {text_of(now[key])}"


def _newest(directory: Path) -> Path | None:
    """As Checkpointer.latest finds it, without torch."""
    pointer = directory / "latest"
    name = pointer.read_text().strip() if pointer.is_file() else ""  # empty where the disk was full
    if name and _json(directory / name / "meta.json") is not None:
        return directory / name
    complete = [p.parent for p in directory.glob("step_*/meta.json") if p.parent.suffix == "" and _json(p) is not None]
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _complete_ones(output_dir: Path, path: Path) -> str:
    found = sorted(
        str(meta.parent)
        for directory in {output_dir / "checkpoints", path, path / "checkpoints", path.parent}
        for meta in directory.glob("step_*/meta.json")
    )
    return f"there are {', '.join(found)}" if found else "give a directory such as RUN/checkpoints/step_00000040"


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
