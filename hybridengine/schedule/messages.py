"""Messages between the training and the rollout pool. Weights are not sent here, see placement/disaggregated.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridengine.schedule.pool import Group
from hybridengine.types import Prompt, SamplingParams, Trajectory

# -- training pool to a replica ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submit:
    """Generate what is unfinished in these groups."""

    groups: Sequence[Group]


@dataclass(slots=True)
class Update:
    """Stop at the next token, send Ready, take part in the weight sync to ``version``, go on with the new weights."""

    version: int


@dataclass(slots=True)
class Recall:
    """Stop, drop the queue, and send back the tokens of unfinished samples."""


@dataclass(slots=True)
class Evaluate:
    """Generate responses to these prompts with the current weights; running samples wait."""

    prompts: Sequence[Prompt]
    params: SamplingParams


@dataclass(slots=True)
class Stop:
    """Send Usage and end."""


# -- replica to training pool ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Done:
    """Finished and scored samples."""

    samples: list[Trajectory]


@dataclass(slots=True)
class Recalled:
    """Answer to Recall: unfinished samples that have tokens. Everything finished has been sent before."""

    samples: list[Trajectory]


@dataclass(slots=True)
class Evaluated:
    """Answer to Evaluate, scored, in the order of the prompts."""

    samples: list[Trajectory]


@dataclass(slots=True)
class Ready:
    """First answer to Update: the engine can take weights. The sync starts when every replica has sent it."""


@dataclass(slots=True)
class Usage:
    """Since the last Usage: seconds spent generating and waiting for work, tokens generated, engines started again.

    Sent with each Update.
    """

    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    tokens: int = 0
    restarts: int = 0
    scoring: list[float] = field(default_factory=list)  # of ScoringStats


@dataclass(slots=True)
class Failed:
    """The replica can't go on."""

    reason: str
