"""What the comparison at the end of a sync can and must see, on layouts made for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridengine.distributed.world import World
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice
from hybridengine.sync.transfer.base import FingerprintMismatchError, NoEngine, TransferSettings, WeightSyncError
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.ranks import run_ranks

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def trained_by_rank_0(shape: tuple[int, ...], strides: tuple[int, ...]) -> ShardMap:
    whole = TensorSlice("w", (0,) * len(shape), shape, "w", 0, strides)
    return ShardMap({"w": ParamSpec("w", shape, "float32")}, [(whole,), ()], {"w": "float32"}).validate()


class Engine(NoEngine):
    """Tensors under names, on either side."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.local_tensors = self.live_tensors = tensors.copy


def engines(world: World, train: ShardMap, rollout: ShardMap) -> tuple[Engine, Engine]:
    """Both sides' tensors, as large as their slices reach; the trainer's hold 0, 1, 2, ..."""
    found = []
    for layout in (train, rollout):
        sizes: dict[str, int] = {}
        for piece in layout.ranks[world.rank]:
            end = piece.start + sum((n - 1) * s for n, s in zip(piece.sizes, piece.strides, strict=True)) + 1
            sizes[piece.tensor] = max(end, sizes.get(piece.tensor, 0))
        dtype = getattr(torch, layout.dtype["w"])
        found.append(Engine({name: torch.arange(size).to(dtype) for name, size in sizes.items()}))
    return found[0], found[1]


def overlapping(world: World, dtype: str) -> None:
    """Elements served twice by one rank and not at all by another: as many reads as elements, but not one of each."""
    train = trained_by_rank_0((10,), (1,))
    served = [(("t1", 0, 6), ("t2", 0, 4)), (("t1", 4, 6), ("t2", 6, 4))]
    ranks = [[TensorSlice("w", (at,), (n,), name, 0, (1,)) for name, at, n in pieces] for pieces in served]
    rollout = ShardMap({"w": ParamSpec("w", (10,), dtype)}, ranks, {"w": dtype}).validate()
    trainer, engine = engines(world, train, rollout)
    settings = TransferSettings(world=world, timeout_seconds=20)
    transfer = make_transfer("pull", trainer, engine, build_plan(train, rollout), settings)
    for version in (1, 2, 3):
        if world.rank == 0:
            trainer.tensors["w"] += 16
        transfer.run(version)
        for name, at, n in served[world.rank]:
            assert engine.tensors[name].tolist() == [16 * version + i for i in range(at, at + n)]


@DTYPES
def test_a_rank_that_serves_elements_twice(dtype: str) -> None:
    run_ranks(2, overlapping, dtype, timeout=60)


def misread(world: World, dtype: str) -> None:
    """A plan that takes the right elements in a wrong order: the trainer's side is read through its layout alone."""
    train = trained_by_rank_0((8, 6), (6, 1))
    halves = [[TensorSlice("w", (4 * rank, 0), (4, 6), "t", 0, (1, 4))] for rank in range(2)]
    rollout = ShardMap({"w": ParamSpec("w", (8, 6), dtype)}, halves, {"w": dtype}).validate()
    write = ReshardPlan._write
    for wrong in (0, 1):

        def wrong_order(self: ReshardPlan, rank: int, side: int, wrong: int = wrong):
            copies = write(self, rank, side)
            assert all(copy.box.source_strides == (1, 6) for copy in copies)
            return tuple(
                copy._replace(box=copy.box._replace(source_strides=(4, 1))) if copy.target_rank == wrong else copy
                for copy in copies
            )

        ReshardPlan._write = wrong_order
        trainer, engine = engines(world, train, rollout)
        settings = TransferSettings(world=world, timeout_seconds=20)
        transfer = make_transfer("pull", trainer, engine, build_plan(train, rollout), settings)
        with pytest.raises(FingerprintMismatchError, match="w"):
            transfer.run(1)
        transfer.close()


@DTYPES
def test_the_first_sync_finds_a_source_read_in_a_wrong_order(dtype: str) -> None:
    run_ranks(2, misread, dtype, timeout=60)


def not_a_number(world: World, method: str) -> str:
    """A trained weight that is NaN, with bits of its own, and an engine whose loader casts it to others."""
    train = trained_by_rank_0((8, 6), (6, 1))
    halves = [[TensorSlice("w", (4 * rank, 0), (4, 6), "t", 0, (6, 1))] for rank in range(2)]
    rollout = ShardMap({"w": ParamSpec("w", (8, 6), "bfloat16")}, halves, {"w": "bfloat16"}).validate()
    trainer, engine = engines(world, train, rollout)
    engine.load_weight = (
        lambda name, full: engine.tensors["t"].copy_(  # type: ignore[method-assign]
            full.view(8, 6)[4 * world.rank : 4 * world.rank + 4].bfloat16().flatten()
        )
    )
    trainer.full_parameters = lambda: iter(  # type: ignore[method-assign]
        [("w", broadcast(trainer.tensors.get("w", torch.empty(48))).view(8, 6))]
    )
    if world.rank == 0:
        trainer.tensors["w"].view(torch.int32)[:3] = torch.tensor([0x7FC00001, -1, 0x7F800001])
    transfer = make_transfer(method, trainer, engine, build_plan(train, rollout), TransferSettings(world=world))
    try:
        transfer.run(1)
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    assert world.rank == 1 or engine.tensors["t"].isnan().sum() == 3
    return "words agree"


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, src=0)
    return tensor


@pytest.mark.parametrize("method", ["pull", "collective", "gather"])
def test_weights_that_are_nan_are_called_so(method: str) -> None:
    said = run_ranks(2, not_a_number, method, timeout=60)
    expected = "WeightSyncError: weight sync to policy version 1: the trainer's weights are NaN in 1 of 1 parameters"
    assert all(text.startswith(expected) if method == "gather" else text == "words agree" for text in said), said
