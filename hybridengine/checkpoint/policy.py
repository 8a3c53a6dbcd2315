"""When to save a checkpoint: every so many steps or minutes, and when a metric is the best so far."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from hybridengine.config import CheckpointConfig

BEST = "best.json"


class SavePolicy:
    """Decides for all ranks alike: clocks, and metrics such as times, are those of the first rank.

    Args:
        config: the ``checkpoint`` section.
        directory: the checkpoints' directory; what was best before an interruption is read from there.
        clock: seconds.
    """

    def __init__(
        self, config: CheckpointConfig, directory: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._clock = config, clock
        self._saved_at = clock()
        self.metric, self._sign = parse_best(config.best)
        self._record, self._best = directory / BEST, math.nan

    def due(self, step: int) -> bool:
        """Whether to save after ``step``. Collective where ``checkpoint.minutes`` is set."""
        if self._config.every and step % self._config.every == 0:
            return True
        minutes = self._config.minutes
        return bool(minutes) and _first_rank_says(self._clock() - self._saved_at >= 60 * minutes)

    def saved(self) -> None:
        """Restart the clock: a checkpoint has just been written."""
        self._saved_at = self._clock()

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric of ``checkpoint.best`` is better than ever; False where this step did not measure it.

        Collective where ``checkpoint.best`` is set.

        Raises:
            ValueError: the step has been measured, and this metric is not among what was.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            self._check(metrics)
            return _first_rank_says(False)
        if math.isnan(self._best):
            self._best = self._known()
        value = self._sign * metrics[self.metric]
        if not _first_rank_says(value > self._best):
            return False
        self._best = value
        return True

    def _known(self) -> float:
        """The best value of the run that is resumed, negated where less is better."""
        if not self._record.is_file():
            return -math.inf
        known = json.loads(self._record.read_text())
        return self._sign * float(known["value"]) if known["metric"] == self._config.best else -math.inf

    def _check(self, metrics: Mapping[str, float]) -> None:
        assert self.metric is not None
        section = self.metric.split("/")[0]
        measured = [name for name in metrics if name.split("/")[0] == section]
        if measured or section != "validation":  # validations are not part of every step
            raise ValueError(
                f"checkpoint.best={self._config.best}: no such metric; a step has {', '.join(sorted(metrics))}"
            )


def parse_best(text: str | None) -> tuple[str | None, float]:
    """The metric that ``checkpoint.best`` names, and 1 where more is better, -1 where less is ("min:loss")."""
    if text is None:
        return None, 1.0
    return (text.removeprefix("min:"), -1.0) if text.startswith("min:") else (text.removeprefix("max:"), 1.0)


def _first_rank_says(decision: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decision
    flag = torch.tensor([int(decision)])
    dist.broadcast(flag, src=0)
    return bool(flag.item())
