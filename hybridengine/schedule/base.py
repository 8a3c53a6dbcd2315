"""Where the trainer's batches come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hybridengine.types import Prompt, SamplingParams, Trajectory


class RolloutLostError(RuntimeError):
    """Whoever generates can't go on; the trainer saves and stops."""


class RolloutSource(Protocol):
    """One per run, on every training rank; all methods are collective over the training ranks."""

    handoff: str  # name of the weight handoff, for the summary

    def next(self) -> tuple[list[Trajectory], dict[str, float]]:
        """The next training batch: whole groups, scored, the same on every rank in the same order; and metrics."""
        ...

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Trajectory]:
        """Scored answers of the current policy version, in the order of the prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on: position in the data, groups on the way."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Counters of the run so far, for every step's record."""
        ...

    def close(self) -> None: ...
