"""The movers of one run: what each owner's memory is, in terms of the two engines, and where it rests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.memory.flat import pack
from hybridengine.memory.residency import (
    GRADS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    ROLLOUT_WEIGHTS,
    TRAINER_PARAMS,
    Mover,
    Residency,
    State,
)
from hybridengine.platform.cpu.mapped import offload_of


def make_residency(
    config: Config,
    *,
    train: Any,
    rollout: RolloutEngine,
    world: World,
    aliased: bool,
    say: Callable[[str], None],
) -> Residency:
    """The Residency of one rank's two engines. A training engine may bring ``movers(offload_dir)`` of its own.

    Host memory is where a CPU run's tensors already are: there only a directory on a disk takes them in.
    """
    memory, sleep_level = config.memory, config.rollout.sleep_level
    elsewhere = world.is_cuda or memory.offload_dir is not None
    rest = rest_states(
        sleep_level=sleep_level,
        offload_optimizer=memory.offload_optimizer and elsewhere,
        offload_weights=memory.offload_weights and elsewhere,
    )
    own = getattr(train, "movers", None)
    if own is not None and memory.offload_optimizer:
        rest[GRADS] = State.DROPPED  # megatron's gradient buffers outlive the step; their contents do not
    if sleep_level == 1 and not world.is_cuda:
        rest[ROLLOUT_WEIGHTS] = State.DEVICE
    if own is not None:
        trainer = own(memory.offload_dir)
    else:
        trainer = fsdp_movers(train, offload_dir=memory.offload_dir, aliased=aliased)
    movers = trainer | rollout_movers(rollout)
    say(f"memory: {describe(rest, movers, 'disk' if memory.offload_dir else 'host')}")
    # What leaves goes back to the driver: a sleeping vLLM's memory is not torch's to reuse, nor the reverse.
    return Residency(
        movers, rest=rest, aliased=aliased, after_leaving=torch.cuda.empty_cache if world.is_cuda else None
    )


def describe(rest: Mapping[str, State], movers: Iterable[str], host: str) -> str:
    """One line: where each owner is while it is not needed."""
    words = {State.DEVICE: "stay", State.HOST: f"to {host}", State.DROPPED: "dropped"}
    groups: dict[str, list[str]] = {}
    for owner in movers:
        if owner in rest:
            groups.setdefault(words[rest[owner]], []).append(owner)
    return "while not needed: " + "; ".join(f"{', '.join(owners)} {what}" for what, owners in groups.items())


class RolloutMover:
    """One tag of a rollout engine. How deep it sleeps is the engine's own setting (``rollout.sleep_level``)."""

    def __init__(self, engine: RolloutEngine, tag: str) -> None:
        self._engine, self._tag = engine, tag

    def offload(self) -> None:
        self._engine.sleep((self._tag,))

    def drop(self) -> None:
        self._engine.sleep((self._tag,))

    def onload(self) -> None:
        self._engine.wake((self._tag,))

    def nbytes(self) -> int:
        return self._engine.nbytes(self._tag)


class NothingToMove:
    """An owner that is counted and never moves."""

    def __init__(self, sizes: Callable[[], int]) -> None:
        self.nbytes = sizes

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def drop(self) -> None: ...


def fsdp_movers(engine: Any, *, offload_dir: Path | str | None = None, aliased: bool = False) -> dict[str, Mover]:
    """Movers of an FSDPEngine: training weights, gradients, optimizer, and the reference where there is one.

    Before weights move, FSDP's gathered copies are freed. Shards that nobody else uses, neither a peer nor the rollout
    engine (``aliased``), are packed onto one storage here.
    """
    policy, optimizer = engine.policy, engine.optimizer
    policy.reshard()
    if not aliased:
        pack([*policy.local_tensors().values(), *engine.memory_holders()])
    movers: dict[str, Mover] = {
        TRAINER_PARAMS: offload_of(
            lambda: [*policy.local_tensors().values(), *engine.memory_holders()], offload_dir, prepare=policy.reshard
        ),
        GRADS: offload_of(lambda: _gradients(engine), offload_dir),
        OPTIMIZER: offload_of(lambda: _moments(optimizer), offload_dir),
    }
    if engine.reference is not None:
        reference = engine.reference
        shards = reference.local_tensors()
        if all(shard.device.type == "cpu" for shard in shards.values()) and engine.world.is_cuda:
            # FSDP itself keeps a frozen model's shards in host memory and streams them in layer by layer.
            movers[REFERENCE] = NothingToMove(lambda: 0)
        else:
            pack([*shards.values(), *reference.memory_holders()])
            movers[REFERENCE] = offload_of(
                lambda: [*reference.local_tensors().values(), *reference.memory_holders()],
                offload_dir,
                prepare=reference.reshard,
            )
    return movers


def rollout_movers(engine: RolloutEngine) -> dict[str, Mover]:
    """Movers of a rollout engine's two tags."""
    return {ROLLOUT_WEIGHTS: RolloutMover(engine, "weights"), KV_CACHE: RolloutMover(engine, "kv_cache")}


def rest_states(*, sleep_level: int, offload_optimizer: bool, offload_weights: bool) -> dict[str, State]:
    """Where owners wait, from the configuration's keys.

    Gradients do not exist between an optimizer step and the next backward pass, so they are never in the way.
    """
    return {
        TRAINER_PARAMS: State.HOST if offload_weights else State.DEVICE,
        OPTIMIZER: State.HOST if offload_optimizer else State.DEVICE,
        REFERENCE: State.HOST if offload_weights else State.DEVICE,
        ROLLOUT_WEIGHTS: {0: State.DEVICE, 1: State.HOST, 2: State.DROPPED}[sleep_level],
        KV_CACHE: State.DROPPED if sleep_level else State.DEVICE,
    }


def _gradients(engine: Any) -> list[torch.Tensor]:
    grads = [shard.grad for shard in engine.policy.shards.values()]
    return [grad.to_local() for grad in grads if grad is not None] + engine.optimizer.grads()


def _moments(optimizer: Any) -> list[torch.Tensor]:
    """Those that exist. Not ``moments()``: that would make them before the first step, only to move them."""
    if optimizer._adamw is None:
        return []
    states = optimizer._adamw.state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
