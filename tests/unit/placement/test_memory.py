"""Where each owner of memory waits and where it starts, by the configuration and the two engines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.config import Config, MemoryConfig, RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.memory.residency import (
    GRADS,
    KV_CACHE,
    OPTIMIZER,
    REFERENCE,
    ROLLOUT_WEIGHTS,
    SYNC,
    TRAINER_PARAMS,
    Residency,
    State,
)
from hybridengine.placement.memory import make_residency
from tests.unit.memory.fake_mover import FakeMover

CPU, CUDA = World(), World(device=torch.device("cuda", 0))
DEVICE, HOST, DROPPED = State.DEVICE, State.HOST, State.DROPPED


class Rollout:
    """Records what it is told to do with its memory."""

    def __init__(self, awake: set[str]) -> None:
        self.awake, self.log = frozenset(awake), list[str]()

    def sleep(self, tags: tuple[str, ...]) -> None:
        self.log.append(f"sleep {tags}")

    def wake(self, tags: tuple[str, ...]) -> None:
        self.log.append(f"wake {tags}")

    def nbytes(self, tag: str) -> int:
        return {"weights": 30, "kv_cache": 70}[tag]


def residency(
    world: World = CPU,
    *,
    rollout: Rollout | None = None,
    sleep_level: int = 2,
    keeps_gradients: bool = False,
    said: Callable[[str], None] = lambda text: None,
    held: bool = False,
    process: str = "same",
    **memory: Any,
) -> Residency:
    given: dict[str, Any] = {}

    def movers(directory: str | None, *, keep_in_place: bool) -> dict[str, FakeMover]:
        given.update(directory=directory, keep_in_place=keep_in_place)
        return {owner: FakeMover(owner, []) for owner in (TRAINER_PARAMS, GRADS, OPTIMIZER)}

    train: Any = SimpleNamespace(movers=movers, keeps_gradients=keeps_gradients)
    config = Config(memory=MemoryConfig(**memory), rollout=RolloutConfig(sleep_level=sleep_level, process=process))
    transfer: Any = SimpleNamespace(holds_shards=held, bytes_aliased=10 * held)
    made = make_residency(
        config, train=train, rollout=rollout or Rollout({"weights", "kv_cache"}), world=world, transfer=transfer,
        log_rank0=said,
    )  # type: ignore[arg-type]  # fmt: skip
    assert given == {"directory": config.memory.offload_dir, "keep_in_place": held} and made.aliased == held
    return made


#: world, sleep level, memory.* -> where training weights, optimizer, rollout weights and KV cache wait.
CASES: dict[str, tuple[World, int, dict[str, Any], tuple[State, ...]]] = {
    "cpu": (CPU, 2, {}, (DEVICE, DEVICE, DROPPED, DROPPED)),
    "cpu-with-a-disk": (CPU, 2, {"offload_dir": "/disk"}, (HOST, HOST, DROPPED, DROPPED)),
    "cpu-lightly-asleep": (CPU, 1, {"offload_dir": "/disk"}, (HOST, HOST, DEVICE, DROPPED)),
    "cpu-awake": (CPU, 0, {"offload_dir": "/disk", "offload_weights": False}, (DEVICE, HOST, DEVICE, DEVICE)),
    "gpu": (CUDA, 2, {}, (HOST, HOST, DROPPED, DROPPED)),
    "gpu-lightly-asleep": (CUDA, 1, {"offload_optimizer": False}, (HOST, DEVICE, HOST, DROPPED)),
    "gpu-lightly-asleep-elsewhere": (CUDA, 1, {"process": "separate"}, (HOST, HOST, DEVICE, DROPPED)),
}


@pytest.mark.parametrize("case", CASES)
def test_where_owners_wait(case: str) -> None:
    world, level, memory, states = CASES[case]
    rest = residency(world, sleep_level=level, **memory).rest
    assert tuple(rest[owner] for owner in (TRAINER_PARAMS, OPTIMIZER, ROLLOUT_WEIGHTS, KV_CACHE)) == states
    assert rest[REFERENCE] is rest[TRAINER_PARAMS]


@pytest.mark.parametrize(
    ("keeps", "offloads", "rest"), [(True, True, DROPPED), (True, False, DEVICE), (False, True, DEVICE)]
)
def test_gradient_buffers_leave_only_where_there_are_any_between_steps(
    keeps: bool, offloads: bool, rest: State
) -> None:
    made = residency(CUDA, keeps_gradients=keeps, offload_optimizer=offloads)
    assert made.rest.get(GRADS, DEVICE) is rest


def test_an_engine_that_was_put_to_sleep_is_woken_by_the_first_sync_alone() -> None:
    rollout = Rollout({"kv_cache"})
    made = residency(CUDA, rollout=rollout)
    assert made[ROLLOUT_WEIGHTS] is DROPPED and made.is_blank(ROLLOUT_WEIGHTS) and made[KV_CACHE] is DEVICE
    made.enter(SYNC)
    assert rollout.log == ["sleep ('kv_cache',)", "wake ('weights',)"]
    assert made.sizes() == {TRAINER_PARAMS: 100, GRADS: 100, ROLLOUT_WEIGHTS: 30}


def test_the_choice_is_said_in_one_line() -> None:
    said: list[str] = []
    residency(CPU, said=said.append, offload_dir="/disk")
    assert said == [
        "memory: while not needed: trainer_params, optimizer to disk; rollout_weights, kv_cache dropped",
    ]
