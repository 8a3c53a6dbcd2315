"""Movers of a run's owners, built from its two engines, and where each owner waits while it is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.rollout.traits import runs_in_own_processes
from hybridengine.engines.train.base import TrainEngine
from hybridengine.memory.residency import (
    CRITIC,
    GRADS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    REWARD_MODEL,
    ROLLOUT_WEIGHTS,
    TRAINER_PARAMS,
    Residency,
    State,
)
from hybridengine.platform.base import Mover
from hybridengine.sync.transfer.base import WeightTransfer


def make_residency(
    config: Config,
    *,
    train: TrainEngine,
    rollout: RolloutEngine,
    transfer: WeightTransfer,
    world: World,
    log_rank0: Callable[[str], None],
    beside: Mapping[str, Mover] | None = None,
) -> Residency:
    """The Residency of one rank's engines, as they are now: a rollout engine may be asleep already.

    ``beside``: movers of further models, by owner.

    Host memory is where a CPU run's tensors already are: there only a directory on a disk takes them in.
    """
    memory, sleep_level = config.memory, config.rollout.sleep_level
    elsewhere = world.platform.separate_memory or memory.offload_dir is not None
    rest = rest_states(
        sleep_level=sleep_level,
        offload_optimizer=memory.offload_optimizer and elsewhere,
        offload_weights=memory.offload_weights and elsewhere,
    )
    if train.keeps_gradients and memory.offload_optimizer:
        rest[GRADS] = State.DROPPED  # the buffers outlive the step; their contents do not
    if sleep_level == 1 and (runs_in_own_processes(config.rollout) or not world.platform.separate_memory):
        rest[ROLLOUT_WEIGHTS] = State.DEVICE  # what another process has mapped stays
    movers = train.movers(memory.offload_dir, keep_in_place=transfer.holds_shards)
    movers |= rollout_movers(rollout) | dict(beside or {})
    log_rank0(f"memory: {describe(rest, movers, 'disk' if memory.offload_dir else 'host')}")
    # What leaves goes back to the driver: a sleeping vLLM's memory is not torch's to reuse, nor the reverse.
    return Residency(
        movers,
        rest=rest,
        start=asleep(rollout),
        aliased=transfer.bytes_aliased > 0,
        after_leaving=world.platform.release_cached,
    )


def asleep(rollout: RolloutEngine) -> dict[str, State]:
    """Initial states of a new rollout engine's owners that are asleep: their contents need not be kept."""
    owners = {"weights": ROLLOUT_WEIGHTS, "kv_cache": KV_CACHE}
    return {owner: State.DROPPED for tag, owner in owners.items() if tag not in rollout.awake}


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
        CRITIC: State.HOST if offload_weights else State.DEVICE,
        REWARD_MODEL: State.HOST if offload_weights else State.DEVICE,
        ROLLOUT_WEIGHTS: {0: State.DEVICE, 1: State.HOST, 2: State.DROPPED}[sleep_level],
        KV_CACHE: State.DROPPED if sleep_level else State.DEVICE,
    }


class WholeEngine:
    """All of a training engine as one owner: weights and optimizer wait together; gradients have nothing to keep."""

    def __init__(self, movers: Mapping[str, Mover]) -> None:
        self._kept = [movers[owner] for owner in (TRAINER_PARAMS, OPTIMIZER)]
        self._grads = movers[GRADS]

    def offload(self) -> None:
        self._grads.drop()
        for mover in self._kept:
            mover.offload()

    def onload(self) -> None:
        for mover in (*self._kept, self._grads):
            mover.onload()

    def drop(self) -> None:
        raise NotImplementedError("a critic's weights can't be rebuilt")

    def nbytes(self) -> int:
        return sum(mover.nbytes() for mover in (*self._kept, self._grads))
