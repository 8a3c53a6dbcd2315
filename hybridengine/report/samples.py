"""Responses to look at: a right one and a wrong one of each validation, others each time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.types import Trajectory

SAMPLES_FILE = "samples.jsonl"

#: A response is right when its first reward is the full one.
FULL_REWARD = 1.0 - 1e-6


@dataclass(slots=True)
class Sample:
    """A response as it is shown, kept in samples.jsonl."""

    step: int
    right: bool
    prompt: str
    response: str
    answer: str
    reward: float | None
    rewards: dict[str, float] = field(default_factory=dict)
    tokens: int = 0


def is_right(trajectory: Trajectory) -> bool:
    """Whether the first configured reward is the full one, as validations count accuracy."""
    return bool(trajectory.rewards) and next(iter(trajectory.rewards.values())) >= FULL_REWARD


def choose_samples(trajectories: Sequence[Trajectory], count: int, *, step: int) -> list[Trajectory]:
    """``count`` responses, right and wrong ones by turns; another ``step`` gives others.

    Where no response is right, those with the highest reward stand for the right ones.
    """
    right, wrong = _halves(trajectories)
    draw = random.Random(f"samples/{step}")
    draw.shuffle(right)
    draw.shuffle(wrong)
    chosen: list[Trajectory] = []
    while len(chosen) < count and (right or wrong):
        for side in (right, wrong):
            if side and len(chosen) < count:
                chosen.append(side.pop())
    return chosen


def _halves(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    right = [t for t in trajectories if is_right(t)]
    if not right:
        rewards = [t.reward for t in trajectories if t.reward is not None]
        if rewards and max(rewards) > min(rewards):
            right = [t for t in trajectories if t.reward == max(rewards)]
    chosen = {id(t) for t in right}
    return right, [t for t in trajectories if id(t) not in chosen]


def to_sample(trajectory: Trajectory, decode: Callable[..., str] | None, *, step: int) -> Sample:
    """With the response as text, special tokens included."""
    response = decode(trajectory.token_ids) if decode is not None else str(trajectory.token_ids)
    return Sample(
        step=step,
        right=is_right(trajectory),
        prompt=trajectory.prompt.text,
        response=response,
        answer=str(trajectory.prompt.answer),
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        tokens=len(trajectory.token_ids),
    )


def append_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Add to samples.jsonl."""
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")


def read_samples(path: Path, *, up_to: int | None = None) -> list[Sample]:
    """Those of samples.jsonl, up to a step; an incomplete last line, left by a kill, is dropped."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            break
        if up_to is None or values["step"] <= up_to:
            found.append(Sample(**values))
    return found
