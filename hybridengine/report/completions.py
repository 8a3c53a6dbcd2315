"""Responses kept on disk (``logging.completions``), and a viewer for them.

    python -m hybridengine.report.completions outputs/run                          the newest step, best and worst first
    python -m hybridengine.report.completions outputs/run --step 40 --max-reward 0 --limit 5
    python -m hybridengine.report.completions outputs/run --grep 'I think' --prompt 12

``output_dir/completions/step_00000040.jsonl`` has one JSON object per response of a training step, and
``validation_00000040.jsonl`` those of a validation: prompt, response, answer, rewards, length.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridengine.types import Trajectory

DIRECTORY = "completions"

Decode = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which responses to show; None leaves a side open."""

    prompt: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    pattern: str | None = None

    def matches(self, row: dict[str, Any]) -> bool:
        reward = row.get("reward")
        return (
            (self.prompt is None or row["prompt_index"] == self.prompt)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
            and (self.pattern is None or re.search(self.pattern, row["response"]) is not None)
        )


def write_completions(path: Path, trajectories: Sequence[Trajectory], decode: Decode, *, step: int) -> None:
    """One JSON object per response; special tokens stay in the text.

    Args:
        decode: tokens to text.
        step: training steps done when they were generated.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for t in trajectories:
            row = {
                "step": step,
                "prompt_index": t.prompt.index,
                "sample": t.sample_index,
                "prompt": t.prompt.text,
                "response": decode(t.token_ids),
                "answer": t.prompt.answer,
                "reward": t.reward,
                "rewards": t.rewards,
                "tokens": len(t.token_ids),
                "truncated": t.truncated,
                "versions": [t.versions[0], t.versions[-1]] if t.versions else [],
            }
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    temporary.replace(path)


def file_of(output_dir: Path, step: int, *, validation: bool = False) -> Path:
    """Where the responses of a step, or of a validation after it, are kept."""
    return output_dir / DIRECTORY / f"{'validation' if validation else 'step'}_{step:08d}.jsonl"


def read_completions(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def kept_steps(output_dir: Path, *, validation: bool = False) -> list[int]:
    """Steps whose responses are on disk, in order."""
    kind = "validation" if validation else "step"
    files = (output_dir / DIRECTORY).glob(f"{kind}_*.jsonl")
    return sorted(int(path.stem.rsplit("_", 1)[1]) for path in files)


def main(arguments: Sequence[str] | None = None) -> int:
    """The viewer; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.report.completions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's output_dir")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--validation", action="store_true", help="responses of validations")
    parser.add_argument("--prompt", type=int, help="of this prompt only, by its index")
    parser.add_argument("--min-reward", type=float)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--grep", metavar="REGEX", help="responses in which it is found")
    parser.add_argument("--limit", type=int, default=8, help="responses shown; 0 = all; default: %(default)s")
    given = parser.parse_args(arguments)
    steps = kept_steps(given.run, validation=given.validation)
    if not steps:
        sys.stderr.write(f"hybridengine.report.completions: {given.run}: none kept; train with logging.completions=1\n")
        return 2
    step = steps[-1] if given.step is None else given.step
    if step not in steps:
        sys.stderr.write(f"hybridengine.report.completions: no responses of step {step}; there are {_ranges(steps)}\n")
        return 2
    wanted = Filter(given.prompt, given.min_reward, given.max_reward, given.grep)
    rows = list(read_completions(file_of(given.run, step, validation=given.validation)))
    _show([row for row in rows if wanted.matches(row)], len(rows), step, given.limit)
    return 0


def _show(rows: list[dict[str, Any]], total: int, step: int, limit: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    shown = rows if limit == 0 or len(rows) <= limit else _extremes(rows, limit)
    console.print(f"step {step}: {len(rows)} of {total} responses match, {len(shown)} shown")
    for row in shown:
        terms = ", ".join(f"{name} {value:g}" for name, value in row["rewards"].items())
        head = f"prompt {row['prompt_index']}, sample {row['sample']}: reward {row['reward']}"
        cut = ", cut at the limit" if row["truncated"] else ""
        console.rule(Text(f"{head} ({terms}), {row['tokens']} tokens{cut}"), align="left")
        console.print(Text(row["prompt"], "dim"))
        console.print(Text(row["response"]))
        console.print(Text(f"answer: {row['answer']}", "green"))


def _extremes(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The best and the worst half and half, both in falling order of reward."""
    ordered = sorted(rows, key=lambda row: -(row["reward"] if row["reward"] is not None else 0.0))
    best = limit - limit // 2
    return ordered[:best] + ordered[len(ordered) - limit // 2 :]


def _ranges(steps: Sequence[int]) -> str:
    """Steps in words: 1, 2, 3, 10 are "1-3, 10"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


if __name__ == "__main__":
    sys.exit(main())
