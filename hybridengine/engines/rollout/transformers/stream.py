"""RolloutStream on the transformers engine: batches one after the other, as its padded cache has no free slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridengine.engines.rollout.streaming import tokens_left
from hybridengine.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from hybridengine.engines.rollout.transformers.engine import TransformersEngine


class TransformersStream:
    """See RolloutStream. A sample that is submitted while a batch is decoded waits for the next one."""

    def __init__(self, engine: TransformersEngine, params: SamplingParams, *, seed: int) -> None:
        self._engine, self._params, self._seed = engine, params, seed
        self._waiting: list[tuple[Trajectory, int]] = []
        self._active: dict[int, Trajectory] = {}
        self._batch: Iterator[list[Trajectory]] | None = None
        self.slots = engine.config.max_num_seqs

    @property
    def running(self) -> int:
        return len(self._waiting) + len(self._active)

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        tokens_left(trajectory, self._params, self._engine.max_model_len)
        self._waiting.append((trajectory, step))
        self._engine.running += 1

    def step(self) -> list[Trajectory]:
        if self._batch is None:
            if not self._waiting:
                return []
            size = self._engine.config.max_num_seqs
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            self._active = {id(trajectory): trajectory for trajectory, _ in batch}
            self._batch = self._engine.decode(
                [trajectory for trajectory, _ in batch], self._params, self._seed, [step for _, step in batch]
            )
        finished = next(self._batch)
        for trajectory in finished:
            del self._active[id(trajectory)]
        self._engine.running -= len(finished)
        if not self._active:
            self._batch = None
        return finished

    def interrupt(self) -> list[Trajectory]:
        stopped = [*self._active.values(), *(trajectory for trajectory, _ in self._waiting)]
        self._engine.running -= len(stopped)
        self._batch, self._active, self._waiting = None, {}, []
        return stopped
