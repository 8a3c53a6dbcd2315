"""What scoring cost: seconds, how much of it generation hid, errors; summed over ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridengine.rewards.tasks import TIMEOUT, Task

SUMS = ("busy", "hidden", "queued", "samples", "retries")


class ScoringStats:
    """Sums since the last :meth:`take`. Safe to use from several threads.

    Args:
        names: of the reward functions; errors and timeouts are counted for each.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._lock = threading.Lock()
        self._waiting_since: float | None = None
        self._sums = self._zeros()

    def waiting(self, since: float | None) -> None:
        """Generation is over and scoring is waited for, from ``since`` on (time.monotonic()); None: no longer."""
        with self._lock:
            self._waiting_since = since

    def finished(self, task: Task, kind: str | None) -> None:
        """A call ended now; ``kind`` of its failure, None when it had none."""
        now = time.monotonic()
        assert task.started is not None
        with self._lock:
            begin, wait = task.started, self._waiting_since
            self._sums["busy"] += now - begin
            self._sums["hidden"] += now - begin if wait is None else max(0.0, wait - begin)
            self._sums["queued"] += sum(begin - job.submitted for job in task.jobs)
            self._sums["samples"] += len(task.jobs)
            if kind is not None:
                self._sums[f"errors/{task.reward.name}"] += len(task.jobs)
            if kind == TIMEOUT:
                self._sums[f"timeouts/{task.reward.name}"] += len(task.jobs)

    def retried(self) -> None:
        """A call was made again."""
        with self._lock:
            self._sums["retries"] += 1

    def take(self) -> list[float]:
        """The sums, which begin at 0 again."""
        with self._lock:
            taken, self._sums = list(self._sums.values()), self._zeros()
        return taken

    def metrics(self, taken: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics of what several ranks, or several windows of one, have taken.

        ``reward/busy_seconds``: of all calls together. ``reward/hidden_fraction``: how much of that passed while
        responses were still being generated. ``reward/queue_seconds``: from a response's end to the call, on average.
        ``reward/errors/<name>``, ``reward/timeouts/<name>``: samples that scored 0 since the function failed, and
        those of them where it took too long. ``reward/retries``: calls repeated since their process had died.
        """
        sums = dict(zip(self._zeros(), (sum(column) for column in zip(*taken, strict=True)), strict=True))
        found = {"reward/busy_seconds": sums["busy"], "reward/retries": sums["retries"]}
        if sums["busy"]:
            found["reward/hidden_fraction"] = sums["hidden"] / sums["busy"]
        if sums["samples"]:
            found["reward/queue_seconds"] = sums["queued"] / sums["samples"]
        return found | {f"reward/{name}": value for name, value in sums.items() if "/" in name}

    def _zeros(self) -> dict[str, float]:
        per_reward = [f"{what}/{name}" for name in self.names for what in ("errors", "timeouts")]
        return dict.fromkeys([*SUMS, *per_reward], 0.0)


def sum_over_ranks(taken: Sequence[float]) -> list[float]:
    """Collective over the default group: the sums of all ranks."""
    sums = torch.tensor(taken, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return list(sums.tolist())
