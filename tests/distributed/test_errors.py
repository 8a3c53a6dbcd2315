"""What failed is what is raised, also where the failure has taken the process group down."""

from __future__ import annotations

import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from tests.distributed.ranks import run_ranks


def fail_and_destroy(world: World, whole_group: bool) -> str:
    group = dist.new_group([0, 1])
    try:
        with agree("starting the engine", group):
            dist.destroy_process_group(None if whole_group else group)
            raise NotImplementedError(f"no kernel for this model on rank {world.rank}")
    except Exception as error:  # noqa: BLE001  the result
        return f"{type(error).__name__}: {error}"


def test_an_engine_that_takes_the_group_along_is_still_what_is_told() -> None:
    for whole_group in (False, True):
        found = run_ranks(2, fail_and_destroy, whole_group)
        assert found == [f"NotImplementedError: no kernel for this model on rank {rank}" for rank in (0, 1)]


def fail_on_one(world: World, failing: int) -> str:
    try:
        with agree("reading the file"):
            if world.rank == failing:
                raise OSError("no such file")
    except Exception as error:  # noqa: BLE001  the result
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_one_rank_s_error_is_its_own_and_the_others_are_told_whose_it_is() -> None:
    told = "PeerError: reading the file: rank 1 failed (1 of 3 ranks): OSError: no such file"
    assert run_ranks(3, fail_on_one, 1) == [told, "OSError: no such file", told]
    assert run_ranks(2, fail_on_one, -1) == ["nothing", "nothing"]
