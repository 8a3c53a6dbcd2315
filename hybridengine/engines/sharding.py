"""ShardingManager: the mode switch between the training and the inference layout of the one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hybridengine.distributed.errors import raise_together
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.handoff.base import SyncReport, WeightHandoff
from hybridengine.tracing import PhaseTimer


class ShardingManager:
    """The only object that knows both engines.

    ``with sharding.rollout_mode():`` is the whole protocol: weights awake → handoff, fingerprints compared →
    KV cache awake → prefix cache reset → *generate* → asleep again. The weights move once per policy
    version; entering twice at the same version only wakes the engine.
    """

    def __init__(
        self, train: TrainEngine, rollout: RolloutEngine, handoff: WeightHandoff, *, timer: PhaseTimer, sleeps: bool
    ) -> None:
        self.train, self.rollout, self.handoff = train, rollout, handoff
        self.timer, self.sleeps = timer, sleeps
        self.last_report: SyncReport | None = None

    @contextmanager
    def rollout_mode(self) -> Iterator[RolloutEngine]:
        """Inference layout inside, training layout outside.

        Raises:
            the handoff's error, on all ranks; the engine then stays unservable at its old version.
        """
        with self.timer.phase("sync"):
            self.sync()
        try:
            yield self.rollout
        finally:
            if self.sleeps:
                with self.timer.phase("sleep"):
                    self.rollout.sleep()

    def sync(self) -> None:
        """Bring the rollout engine to the trainer's policy version."""
        self.rollout.wake(("weights",))
        if self.rollout.weights_version != self.train.version:
            error: BaseException | None = None
            try:
                self.rollout.begin_update()
                self.last_report = self.handoff.sync(self.train.version)
                self.rollout.finish_update(self.train.version)
            except Exception as caught:  # noqa: BLE001  re-raised on every rank
                error = caught
            raise_together(error, f"weight sync to policy version {self.train.version}")
        self.rollout.wake(("kv_cache",))

    def close(self) -> None:
        """Let go of the handoff's memory, then of the engine."""
        self.handoff.close()
        self.rollout.close()
