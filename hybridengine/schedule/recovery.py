"""A rollout that survives its engine: when a replica's processes die, they are restarted, synced and asked again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridengine.distributed.errors import PeerError, agree, raise_together
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.rollout.remote.messages import EngineLostError
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import ROLLOUT
from hybridengine.schedule.base import RolloutLostError
from hybridengine.sync.manager import ShardingManager
from hybridengine.types import Trajectory

log = logging.getLogger(__name__)

T = TypeVar("T")


class Recovery:
    """Runs work in the inference layout, again where an engine in processes of its own died.

    All replicas repeat the work, because those that lived have only part of the batch; random numbers belong to the
    samples, so the repeated step is the one that would have been. Engines in the trainer's processes need none of
    this: where they die, the trainer does.
    """

    def __init__(self, sharding: ShardingManager, phases: Phases) -> None:
        self._sharding, self._phases = sharding, phases
        self.restarts = 0

    def run(self, work: Callable[[RolloutEngine], T], *, undo: Callable[[], None]) -> T:
        """``work(engine)``; ``undo`` takes back what a broken attempt has left behind. Collective.

        Raises:
            RolloutLostError: on every rank: ``rollout.max_restarts`` are used up.
            what ``work`` or the sync raised, on that rank, and PeerError on the others.
        """
        if not hasattr(self._sharding.rollout, "restart"):
            return self._attempt(work)
        while True:
            error: Exception | None = None
            try:
                found = self._attempt(work)
            except Exception as caught:  # noqa: BLE001  judged below, on all ranks together
                error = caught
            if not self._any_lost(error):
                raise_together(error, "rollout")
                return found
            undo()
            with self._phases("restart"):
                self._restart(error)

    def _attempt(self, work: Callable[[RolloutEngine], T]) -> T:
        with self._sharding.rollout_mode() as engine, self._phases("rollout", ROLLOUT):
            return work(engine)

    def _any_lost(self, error: Exception | None) -> bool:
        lost = torch.tensor([int(isinstance(error, EngineLostError))])
        dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return bool(lost.item())

    def _restart(self, error: Exception | None) -> None:
        engine = self._sharding.rollout
        if isinstance(error, EngineLostError) and engine.leads:  # type: ignore[attr-defined]
            log.warning("replica %d: %s\nreplica %d: starting it again", engine.replica, error, engine.replica)
        try:
            with agree("restarting the rollout engine"):
                engine.restart()  # type: ignore[attr-defined]
        except (EngineLostError, PeerError) as failed:
            raise RolloutLostError(f"{failed}. Last: {error}") from failed
        self._sharding.handoff.distrust()
        self.restarts += 1


def restorer(samples: Iterable[Trajectory]) -> Callable[[], None]:
    """A function that takes ``samples`` back to what they are now."""
    before = [(sample, len(sample.token_ids)) for sample in samples]

    def restore() -> None:
        for sample, length in before:
            del sample.token_ids[length:], sample.logprobs[length:], sample.versions[length:]
            sample.truncated, sample.reward, sample.rewards = False, None, {}

    return restore
