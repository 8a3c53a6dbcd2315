"""Recovery of a rollout: when a replica's engine dies, it is restarted, synced and given its samples again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

import torch
import torch.distributed as dist

from hybridengine.distributed.errors import PeerError, agree, raise_together
from hybridengine.engines.rollout.base import EngineLostError, EngineProcessControl
from hybridengine.memory.phases import Phases
from hybridengine.schedule.base import RolloutLostError
from hybridengine.sync.sharding import ShardingManager
from hybridengine.types import Trajectory

log = logging.getLogger(__name__)


class Attempt:
    """One try. ``keeps``: it holds an exception back until all ranks have agreed on what becomes of it."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return self._keeps and isinstance(error, Exception)


class Recovery:
    """Tries work in the inference layout again where an engine in processes of its own died.

    All replicas repeat the work, because those that lived have only part of the batch; random numbers belong to the
    samples, so the repeated step is the one that would have been. Engines in the trainer's processes need none of
    this: where they die, the trainer does.
    """

    def __init__(self, sharding: ShardingManager, phases: Phases) -> None:
        self._sharding, self._phases = sharding, phases
        self.restarts = 0

    def attempts(self, undo: Callable[[], None]) -> Iterator[Attempt]:
        """Until one has succeeded. Collective. ``undo`` takes back what a broken one has left behind.

        Raises:
            RolloutLostError: on every rank: ``rollout.max_restarts`` are used up.
            what failed inside, on that rank, and PeerError on the others.
        """
        processes = self._sharding.rollout.processes
        if processes is None:
            yield Attempt(keeps=False)
            return
        while True:
            attempt = Attempt(keeps=True)
            yield attempt
            if not _any_lost(attempt.error):
                raise_together(attempt.error, "rollout")
                return
            undo()
            with self._phases("restart"):
                self._restart(processes, attempt.error)

    def _restart(self, processes: EngineProcessControl, error: BaseException | None) -> None:
        replica = self._sharding.rollout.replica
        if isinstance(error, EngineLostError) and processes.is_leader:
            log.warning("replica %d: %s\nreplica %d: starting it again", replica, error, replica)
        try:
            with agree("restarting the rollout engine"):
                processes.restart()
        except (EngineLostError, PeerError) as failed:
            raise RolloutLostError(f"{failed}. Last: {error}") from failed
        self._sharding.weight_sync.transfer.invalidate()
        self.restarts += 1


def _any_lost(error: BaseException | None) -> bool:
    lost = torch.tensor([int(isinstance(error, EngineLostError))])
    dist.all_reduce(lost, op=dist.ReduceOp.MAX)
    return bool(lost.item())


def restorer(samples: Iterable[Trajectory]) -> Callable[[], None]:
    """A function that takes ``samples`` back to what they are now."""
    before = [(sample, len(sample.token_ids)) for sample in samples]

    def restore() -> None:
        for sample, length in before:
            del sample.token_ids[length:], sample.logprobs[length:], sample.versions[length:]
            sample.truncated, sample.reward, sample.rewards = False, None, {}

    return restore
