"""Where the trainer's batches come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hybridengine.types import Prompt, SamplingParams, Trajectory


class RolloutLostError(RuntimeError):
    """The rollout engines can't go on; the trainer saves and stops."""


class RolloutSource(Protocol):
    """One per run, on every training rank; all methods are collective over the training ranks.

    A step of training calls, in this order::

        start_step()
        for attempt in attempts():          # a second one only after an engine died
            with attempt:
                enter_rollout_mode()
                generate()
        batch = rewards()                   # None: more has to be generated

    Attributes:
        transfer: name of the weight transfer, for the summary.
    """

    transfer: str

    def start_step(self) -> None:
        """Mark the last batch as trained on and admit new prompts."""
        ...

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Contexts to generate in, until one of them has succeeded on every rank.

        Raises:
            RolloutLostError: engines have died too often.
            what failed inside, on that rank, and PeerError on the others.
        """
        ...

    def enter_rollout_mode(self) -> None:
        """Sync the trainer's policy version into the rollout engines and move memory for a rollout."""
        ...

    def generate(self) -> None:
        """Samples until there are enough for a batch; they are scored meanwhile."""
        ...

    def rewards(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        """Wait for the scores. The next training batch: whole groups, the same on every rank in the same order; and
        metrics. None while it is not full."""
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
