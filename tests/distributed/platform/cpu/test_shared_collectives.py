"""Collectives through shared memory against arithmetic, across the size of a slot, and with a rank missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.platform.cpu import shared_collectives
from hybridengine.platform.cpu.shared_collectives import SLOT_BYTES, SharedCollectives
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(not shared_collectives.supported(), reason="needs x86 and memfd (Linux)")

#: Elements: none, one, a decode step, exactly one slot of float32, one more, several slots.
SIZES = (0, 1, 32 * 128, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, 3 * SLOT_BYTES // 4 + 7)


def part(rank: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    return ((torch.arange(size) * (rank + 3) + salt) % 251).to(dtype)


def check_sums(world: World) -> None:
    shared = SharedCollectives()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size in SIZES:
            tensor = part(world.rank, size, dtype)
            expected = part(0, size, dtype)
            for rank in range(1, world.size):
                expected = expected + part(rank, size, dtype)
            shared.all_reduce(tensor)
            assert torch.equal(tensor, expected), (dtype, size)
    strided = part(world.rank, 24, torch.float32).view(4, 6).t()
    shared.all_reduce(strided)
    assert torch.equal(strided, sum(part(rank, 24, torch.float32) for rank in range(world.size)).view(4, 6).t())


def check_gathers(world: World) -> None:
    shared = SharedCollectives()
    for size in SIZES:
        tensor = part(world.rank, size, torch.float32)
        parts = [part(rank, size, torch.float32) for rank in range(world.size)]
        output = torch.full((world.size * size,), -1.0)
        shared.all_gather_into_tensor(output, tensor)
        assert torch.equal(output, torch.cat(parts)), size
        found = [torch.full((size,), -1.0) for _ in parts] if world.rank == world.size - 1 else None
        shared.gather(tensor, found)
        assert found is None or all(torch.equal(a, b) for a, b in zip(found, parts, strict=True)), size


def check_many_rounds(world: World) -> None:
    """Ranks run as far apart as the protocol lets them; a slot written too early would show."""
    shared = SharedCollectives()
    for round_ in range(3000):
        tensor = part(world.rank, 64, torch.float32, salt=round_)
        shared.all_reduce(tensor)
        assert torch.equal(tensor, sum(part(rank, 64, torch.float32, salt=round_) for rank in range(world.size)))


def check_missing_rank(world: World, marker: str) -> None:
    shared = SharedCollectives(timeout_seconds=0.3)
    if world.rank == 0:
        with pytest.raises(TimeoutError, match="rank 1 did not join within 0.3 s"):
            shared.all_reduce(torch.ones(3))
        Path(marker).touch()
    while not Path(marker).exists():
        pass


@pytest.mark.parametrize("check", [check_sums, check_gathers, check_many_rounds], ids=lambda check: check.__name__)
@pytest.mark.parametrize("ranks", [2, 3], ids=lambda ranks: f"{ranks}-ranks")
def test_collectives(ranks, check):
    run_ranks(ranks, check)


def test_a_missing_rank_is_named(tmp_path):
    run_ranks(2, check_missing_rank, str(tmp_path / "marker"))
