"""ShardingManager: the mode switch between the training and the inference layout of the one model."""

from __future__ import annotations

from collections.abc import Callable

from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory import kv_plan
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import ROLLOUT, ROLLOUT_WEIGHTS, SYNC
from hybridengine.sync.transfer.base import WeightTransfer
from hybridengine.sync.weight_sync import WeightSync


class ShardingManager:
    """Switches between the two engines of ranks that train and generate in turns.

    Args:
        log_rank0: prints one line about a choice, once.
    """

    def __init__(
        self,
        train: TrainEngine,
        rollout: RolloutEngine,
        transfer: WeightTransfer,
        *,
        phases: Phases,
        world: World,
        log_rank0: Callable[[str], None],
    ) -> None:
        self.train, self.rollout, self.phases = train, rollout, phases
        self.world, self._log_rank0 = world, log_rank0
        self.weight_sync = WeightSync.into(rollout, transfer)
        self._logged = False

    def enter_rollout_mode(self) -> None:
        """Weights of the trainer's policy version in the rollout engine, memory where a rollout needs it.

        Training memory leaves → rollout weights awake → begin, transfer, verify, finish → training weights leave →
        KV cache awake → as much of it usable as is really free. The engine stays awake until a training phase needs
        its memory. Weights move once per policy version: a second rollout at the same version finds all in place.

        Raises:
            torch.OutOfMemoryError: on all ranks: the KV cache cannot hold one sequence. Calling again when there is
                more memory repeats only what was not reached.
            what failed in the weight sync, on all ranks; the engine stays unservable at its old version.
        """
        residency = self.phases.residency
        with self.phases("sync"), self.phases.measured("sync"):
            if self.rollout.weights_version != self.train.version or residency.is_blank(ROLLOUT_WEIGHTS):
                with agree("making room for a weight sync"):
                    residency.enter(SYNC)
                    residency.invalidate(ROLLOUT_WEIGHTS)
                self.weight_sync.run(self.train.version)
                residency.mark_filled(ROLLOUT_WEIGHTS)
            with agree("making room for a rollout"):
                residency.enter(ROLLOUT)
            self._plan_kv_cache()

    def _plan_kv_cache(self) -> None:
        blocks = self.rollout.kv_blocks
        if blocks is not None:
            kv_plan.plan(blocks, self.world)
            if blocks.usable < blocks.total and not self._logged:
                self._logged = True
                self._log_rank0(f"memory: {kv_plan.describe(blocks)}")

    def metrics(self) -> dict[str, float]:
        """Of the syncs; and ``memory/kv_cache_usable``, the share of the KV cache, when it is not all."""
        found, blocks = self.weight_sync.metrics(), self.rollout.kv_blocks
        if blocks is not None and blocks.usable < blocks.total:
            found["memory/kv_cache_usable"] = blocks.usable / blocks.total
        return found

    def close(self) -> None:
        """Release the transfer's memory, then close the engine."""
        self.weight_sync.close()
        self.rollout.close()
