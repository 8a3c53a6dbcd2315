"""What is being scored: a job per trajectory, a task per call of a reward function, and what errors cost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from hybridengine.rewards.base import AUTO, ZERO, RewardError, RewardFunction, describe
from hybridengine.rewards.signatures import Call, Value
from hybridengine.types import Trajectory

#: Kinds of failure. ``refused``: a ValueError, by which verifiers say that a row or an option is wrong.
REFUSED, EXCEPTION, VALUE, EXIT = "refused", "exception", "value", "exit"
MEMORY, TIMEOUT, DIED = "memory", "timeout", "died"
#: Kinds of failure that text which a model wrote can cause in a verifier.
BY_THE_TEXT = (EXCEPTION, EXIT, MEMORY, TIMEOUT, DIED)


@dataclass(slots=True, eq=False)
class Job:
    """One trajectory on its way through all reward functions."""

    trajectory: Trajectory
    submitted: float = field(default_factory=time.monotonic)
    left: int = 0  # calls that are not finished
    values: dict[str, Value] = field(default_factory=dict)
    error: RewardError | None = None
    discarded: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, value: Value) -> bool:
        """Returns whether this was the last one."""
        self.values[name] = value
        self.left -= 1
        return self.left == 0


@dataclass(slots=True, eq=False)
class Task:
    """One call of one reward function, for one job or for a list of them."""

    reward: RewardFunction
    jobs: list[Job]
    calls: list[Call]
    started: float | None = None  # time.monotonic(); None: still in a queue
    finished: bool = False


@dataclass(slots=True)
class Failure:
    """Why a call gave no values. ``traceback`` is text, since it may come from another process; ``score``: what each
    sample gets where that does not end the run."""

    kind: str
    message: str
    traceback: str = ""
    score: float = 0.0
    cause: BaseException | None = None


def scores_zero(reward: RewardFunction, kind: str) -> bool:
    """Whether a failure of this kind costs the sample its score, and not the run."""
    if reward.on_error == ZERO or (reward.verifier and kind in BY_THE_TEXT):
        return True
    return reward.on_error == AUTO and reward.isolated and kind in (TIMEOUT, MEMORY, DIED)


def error_of(task: Task, failure: Failure) -> RewardError:
    """The error that ends the run."""
    where = describe(task.jobs[0].trajectory)
    if len(task.jobs) > 1:
        where = f"a batch of {len(task.jobs)} samples, the first being {where}"
    error = RewardError(f"reward {task.reward.name} on {where}: {failure.message}")
    error.__cause__ = failure.cause
    if failure.traceback and failure.cause is None:
        error.add_note(f"in the worker process:\n{failure.traceback}")
    return error
