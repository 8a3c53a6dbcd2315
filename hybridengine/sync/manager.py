"""ShardingManager: the mode switch between the training and the inference layout of the one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridengine.distributed.errors import raise_together
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory import kv_plan
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import ROLLOUT_WEIGHTS
from hybridengine.sync.transfer.base import SyncReport, WeightHandoff


class ShardingManager:
    """The only object that knows both engines.

    ``with sharding.rollout_mode():`` is the whole protocol: training memory leaves → weights awake → handoff,
    fingerprints compared → training weights leave → KV cache awake, prefix cache reset → as much of it usable as is
    really free → *generate*. The rollout engine stays awake until a training phase needs its memory. The weights move
    once per policy version: a second rollout at the same version finds everything in place.

    Args:
        say: prints one line about a choice, once.
    """

    def __init__(
        self,
        train: TrainEngine,
        rollout: RolloutEngine,
        handoff: WeightHandoff,
        *,
        phases: Phases,
        world: World,
        say: Callable[[str], None],
    ) -> None:
        self.train, self.rollout, self.handoff, self.phases = train, rollout, handoff, phases
        self.world, self.say = world, say
        #: What can be planned anew; None for engines whose cache keeps its size.
        self.kv_blocks: kv_plan.BlockCache | None = getattr(rollout, "kv_blocks", None)
        self.syncs = 0
        self.last_report: SyncReport | None = None
        self._said = False

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
        """Bring the rollout engine to the trainer's policy version, and memory to where a rollout needs it.

        Raises:
            torch.OutOfMemoryError: on all ranks: the KV cache cannot hold one sequence. Calling again when there is
                more memory repeats only what was not reached.
        """
        error: BaseException | None = None
        try:
            residency = self.phases.residency
            current = self.rollout.weights_version == self.train.version and not residency.is_blank(ROLLOUT_WEIGHTS)
            residency.handoff(None if current else self._update)
        except Exception as caught:  # noqa: BLE001  re-raised on every rank
            error = caught
        raise_together(error, f"weight sync to policy version {self.train.version}")
        if self.kv_blocks is not None:
            kv_plan.plan(self.kv_blocks, self.world)
            if self.kv_blocks.usable < self.kv_blocks.total and not self._said:
                self._said = True
                self.say(f"memory: {kv_plan.describe(self.kv_blocks)}")

    def _update(self) -> None:
        self.rollout.begin_update()
        self.last_report = self.handoff.sync(self.train.version)
        self.rollout.finish_update(self.train.version)
        self.syncs += 1

    def metrics(self) -> dict[str, float]:
        """``handoff/syncs`` so far, what the last one did on this rank (``SyncReport.metrics``), and
        ``memory/kv_cache_usable``, the share of the KV cache, when it is not all."""
        found = {"handoff/syncs": float(self.syncs)}
        if self.last_report is not None:
            found |= self.last_report.metrics()
        if self.kv_blocks is not None and self.kv_blocks.usable < self.kv_blocks.total:
            found["memory/kv_cache_usable"] = self.kv_blocks.usable / self.kv_blocks.total
        return found

    def close(self) -> None:
        """Let go of the handoff's memory, then of the engine."""
        self.handoff.close()
        self.rollout.close()
