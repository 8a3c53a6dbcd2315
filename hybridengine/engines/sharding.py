"""ShardingManager: the mode switch between the training and the inference layout of the one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridengine.distributed.errors import raise_together
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.handoff.base import SyncReport, WeightHandoff
from hybridengine.memory.residency import ROLLOUT_WEIGHTS
from hybridengine.phases import Phases


class ShardingManager:
    """The only object that knows both engines.

    ``with sharding.rollout_mode():`` is the whole protocol: training memory leaves → weights awake → handoff,
    fingerprints compared → training weights leave → KV cache awake, prefix cache reset → *generate*. The rollout
    engine stays awake until a training phase needs its memory. The weights move once per policy version: a second
    rollout at the same version finds everything in place.
    """

    def __init__(self, train: TrainEngine, rollout: RolloutEngine, handoff: WeightHandoff, *, phases: Phases) -> None:
        self.train, self.rollout, self.handoff, self.phases = train, rollout, handoff, phases
        self.syncs = 0
        self.last_report: SyncReport | None = None

    @contextmanager
    def rollout_mode(self) -> Iterator[RolloutEngine]:
        """Inference layout inside.

        Raises:
            the handoff's error, on all ranks; the engine then stays unservable at its old version.
        """
        with self.phases("sync"), self.phases.measured("sync"):
            self.sync()
        yield self.rollout

    def sync(self) -> None:
        """Bring the rollout engine to the trainer's policy version, and memory to where a rollout needs it."""
        error: BaseException | None = None
        try:
            residency = self.phases.residency
            current = self.rollout.weights_version == self.train.version and not residency.is_blank(ROLLOUT_WEIGHTS)
            residency.handoff(None if current else self._update)
        except Exception as caught:  # noqa: BLE001  re-raised on every rank
            error = caught
        raise_together(error, f"weight sync to policy version {self.train.version}")

    def _update(self) -> None:
        self.rollout.begin_update()
        self.last_report = self.handoff.sync(self.train.version)
        self.rollout.finish_update(self.train.version)
        self.syncs += 1

    def close(self) -> None:
        """Let go of the handoff's memory, then of the engine."""
        self.handoff.close()
        self.rollout.close()
