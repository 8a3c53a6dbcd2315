"""What each rank has of its own in a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.distributed.world import World
from tests.distributed.ranks import run_ranks


class Nothing:
    """A Checkpointable without state."""

    version = 3

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def _save_and_draw(world: World, directory: str) -> list[tuple[float, float, float]]:
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    checkpointer = Checkpointer(directory)
    checkpointer.save(7, Nothing(), {"step": 7})
    drawn = [_draw()]
    assert checkpointer.load(Nothing()) == {"step": 7}
    return [*drawn, _draw()]


def _load_and_draw(world: World, directory: str) -> tuple[float, float, float]:
    assert Checkpointer(directory).load(Nothing()) == {"step": 7}
    return _draw()


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_and_draw, str(tmp_path))
    assert first[0] == first[1] and second[0] == second[1]
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    # A larger job has the saved ones again.
    assert run_ranks(3, _load_and_draw, str(tmp_path)) == [first[0], second[0], first[0]]
