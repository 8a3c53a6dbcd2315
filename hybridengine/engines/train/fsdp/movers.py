"""Movers of an FSDPEngine's memory between device and host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.tensor import DTensor

from hybridengine.engines.train.optim import ShardedAdamW
from hybridengine.memory.flat import pack
from hybridengine.memory.residency import GRADS, OPTIMIZER, REFERENCE, TRAINER_PARAMS
from hybridengine.platform.base import Mover

if TYPE_CHECKING:
    from hybridengine.engines.train.fsdp.engine import FSDPEngine


class NothingToMove:
    """An owner that is counted and never moves."""

    def __init__(self, sizes: Callable[[], int]) -> None:
        self.nbytes = sizes

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def drop(self) -> None: ...


def fsdp_movers(engine: FSDPEngine, offload_dir: Path | str | None, *, keep_in_place: bool) -> dict[str, Mover]:
    """Movers of an FSDPEngine: training weights, gradients, optimizer, and the reference where there is one.

    Before weights move, FSDP's gathered copies are freed. Shards that need not stay at their addresses for the transfer
    (``keep_in_place=False``) are packed onto one storage here.
    """
    policy, optimizer, move = engine.policy, engine.optimizer, engine.world.platform.mover
    policy.reshard()
    if not keep_in_place:
        pack([*policy.local_tensors().values(), *engine.memory_holders()])
    movers: dict[str, Mover] = {
        TRAINER_PARAMS: move(
            lambda: [*policy.local_tensors().values(), *engine.memory_holders()], offload_dir, prepare=policy.reshard
        ),
        GRADS: move(lambda: _gradients(engine), offload_dir),
        OPTIMIZER: move(lambda: _moments(optimizer), offload_dir),
    }
    if engine.reference is not None:
        reference = engine.reference
        shards = reference.local_tensors()
        if engine.world.platform.parks_frozen:
            # FSDP itself keeps a frozen model's shards in host memory and streams them in layer by layer.
            movers[REFERENCE] = NothingToMove(lambda: 0)
        else:
            pack([*shards.values(), *reference.memory_holders()])
            movers[REFERENCE] = move(
                lambda: [*reference.local_tensors().values(), *reference.memory_holders()],
                offload_dir,
                prepare=reference.reshard,
            )
    return movers


def _gradients(engine: FSDPEngine) -> list[torch.Tensor]:
    grads = [shard.grad for shard in engine.policy.shards.values()]
    return [cast(DTensor, grad).to_local() for grad in grads if grad is not None] + engine.optimizer.grads()


def _moments(optimizer: ShardedAdamW) -> list[torch.Tensor]:
    """The moments that exist. ``moments()`` would create them before the first step, only to move them."""
    if optimizer._adamw is None:
        return []
    states = optimizer._adamw.state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
