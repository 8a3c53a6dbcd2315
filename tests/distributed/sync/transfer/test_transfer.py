"""Weight transfers over real gloo processes: every element is its canonical index, so one wrong one shows."""

from __future__ import annotations

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.chunks import reading
from hybridengine.sync.transfer.pull import BOARD, PullTransfer
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.layouts import (
    MIXED_SOURCE,
    MIXED_TARGET,
    Cut,
    Holder,
    layout,
    only,
    shard,
    tensor_parallel,
)
from tests.distributed.ranks import run_ranks

SOURCES = {"rows": 0, "cols": 1}
TARGETS = {"tp1": (1, 0), "tp2-rows": (2, 0), "tp2-cols": (2, 1), "rank0-only": None}


def target_cut(name: str) -> Cut:
    spec = TARGETS[name]
    return only({0}) if spec is None else tensor_parallel(*spec)


def settings(world: World, **kwargs) -> TransferSettings:
    return TransferSettings(world=world, timeout_seconds=20, **kwargs)


#: test id -> (dtypes of the trainer, of the engine, whether the engine keeps its last dimension outermost)
DTYPES = {
    "float32": ("float32", "float32", False),
    "cast": ("float32", "bfloat16", False),
    "mixed": (MIXED_SOURCE, MIXED_TARGET, False),
    "transposed": ("float32", "float32", True),
}


def matrix(world: World, small: bool) -> None:
    """All layouts, dtypes and methods in one job: starting processes is what costs."""
    for method in ("pull", "collective", "gather", "broadcast"):
        for source_dim in SOURCES.values():
            for target, spec in TARGETS.items():
                if spec is not None and spec[0] > world.size:
                    continue
                for dtype, (held, served, transposed) in DTYPES.items():
                    a = layout(shard(source_dim), world.size, held)
                    b = layout(target_cut(target), world.size, served, transposed=transposed)
                    plan = build_plan(a, b)
                    train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
                    chosen = settings(world)
                    if small:
                        chosen.__class__ = Tiny
                        Tiny.size = smallest_bucket(method, world.size)
                    transfer = make_transfer(method, train, rollout, plan, chosen)
                    casts = method == "pull" and dtype in ("cast", "mixed")
                    if casts and target == "tp1" and world.size > 1:
                        assert are_cut(transfer, plan) == small, (source_dim, dtype)
                    for version in (1, 2):
                        train.write(version)
                        train.version = version
                        report = transfer.run(version)
                        where = (method, source_dim, target, dtype, version)
                        assert rollout.holds(version), where
                        assert report.version == version and report.method == method
                        if method != "gather":
                            assert report.bytes_received == report.bytes_minimum == plan.minimum_bytes(world.rank), (
                                where
                            )
                            assert report.extra_bytes <= chosen.bucket_bytes, where
                            assert report.full_check == (version == 1), where
                            assert report.bytes_local + report.bytes_received == rollout_bytes(rollout), where
                        if method in ("collective", "broadcast") and target == "tp1" and world.size > 1:
                            assert (report.rounds > 1) == small, where
                        if method == "pull" and not casts:
                            assert report.extra_bytes == 0, where
                    transfer.close()


class Tiny(TransferSettings):
    """Buckets far smaller than a parameter: many rounds, tensors cut across chunks."""

    __slots__ = ()
    size = 0

    @property
    def bucket_bytes(self) -> int:
        return self.size


def smallest_bucket(method: str, size: int) -> int:
    """Chunks of 64 bytes, the least that there can be: pull has two in its ring, an exchange four per peer."""
    return 128 if method == "pull" else 256 * max(1, size - 1)


def are_cut(pull: PullTransfer, plan: ReshardPlan) -> bool:
    """Whether some copy that is cast for other ranks is in several parts, and goes through several chunks."""
    staged = pull._staged._chunks
    parts = {reading(item.copies[0]) for chunks in staged.values() for chunk in chunks for item in chunk.items}
    whole = {reading(copy) for rank in staged for copy in plan.sends(rank)}
    return bool(parts - whole) and max(map(len, staged.values())) > 1


@pytest.mark.parametrize("small", [False, True], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("size", [1, 2, 4], ids=["1rank", "2ranks", "4ranks"])
def test_every_layout_dtype_and_method(size: int, small: bool) -> None:
    run_ranks(size, matrix, small)


# -- aliasing ----------------------------------------------------------------------------------------------------------


class WeightExporter(Holder):
    """An engine that can run on foreign memory, for the tensors named."""

    def __init__(self, *args, accepts: set[str], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.accepts = accepts

    def alias_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self.accepts:
            self.tensors[name] = tensor
        return name in self.accepts


def aliased(world: World, accepts: set[str], accepted_by: set[int]) -> None:
    """Rank r's rows are what its tensor-parallel rank needs, except the vectors, which every rank holds whole."""
    shapes = {"a": (8, 6), "b": (4, 2), "v": (8,)}
    a = layout(shard(0), 2, "float32", shapes=shapes)
    b = layout(tensor_parallel(2, 0), 2, "float32", shapes=shapes)
    train = Holder(a, world.rank, fill=0, shapes=shapes)
    mine = accepts if world.rank in accepted_by else set()
    rollout = WeightExporter(b, world.rank, accepts=mine, shapes=shapes)
    transfer = make_transfer("pull", train, rollout, build_plan(a, b), settings(world))
    for version in (1, 2, 3):
        train.write(version)
        report = transfer.run(version)
        assert rollout.holds(version)
        assert report.bytes_aliased == sum(train.tensors[name].nbytes for name in mine & {"a", "b"})
        assert report.bytes_local + report.bytes_received == rollout_bytes(rollout) - report.bytes_aliased
    for name in ("a", "b"):
        assert (rollout.tensors[name].data_ptr() == train.tensors[name].data_ptr()) == (name in mine)


def rollout_bytes(rollout: Holder) -> int:
    return sum(tensor.nbytes for tensor in rollout.tensors.values())


@pytest.mark.parametrize(
    ("accepts", "accepted_by"),
    [({"a", "b", "v"}, {0, 1}), ({"a"}, {0, 1}), ({"a", "b"}, {0})],
    ids=["all", "one-tensor", "one-rank"],
)
def test_what_is_already_here_is_aliased(accepts: set[str], accepted_by: set[int]) -> None:
    """No copy and no second holding; fingerprints still compare what is copied elsewhere."""
    run_ranks(2, aliased, accepts, accepted_by)


# -- order of the fences ---------------------------------------------------------------------------------------------


def fences(world: World) -> None:
    """What one sync does, in order."""
    train = Holder(layout(shard(0), 2, "float32"), world.rank, fill=0)
    rollout = Holder(layout(tensor_parallel(1, 0), 2, "float32"), world.rank)
    transfer = make_transfer("pull", train, rollout, build_plan(train.map, rollout.map), settings(world, verify=False))
    seen: list[str] = []

    def spy(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def recorded(*args, **kwargs):
            seen.append(name if name != "set" else f"set {args[0]}")
            return original(*args, **kwargs)

        setattr(owner, name, recorded)

    control = transfer._regions[BOARD].control
    for owner, name in (
        (control, "publish"),
        (transfer._waiter, "published"),
        (transfer._moves._pulls[1 - world.rank], "run"),
        (control, "set"),
        (transfer._waiter, "all_done"),
    ):
        spy(owner, name)
    transfer.run(1)
    fences = [event for event in seen if event not in ("set version", "set generation")]
    assert fences == ["publish", "published", "run", "set done", "all_done"]


def test_fences_are_in_order() -> None:
    run_ranks(2, fences)


def without_compiler(world: World) -> None:
    """The plain-torch twin serves all of it: copies, cast through the ring, fingerprints, control words."""
    from hybridengine import native

    native.load = lambda: None
    a, b = layout(shard(0), 2, "float32"), layout(tensor_parallel(2, 1), 2, "bfloat16")
    for method in ("pull", "collective"):
        train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
        transfer = make_transfer(method, train, rollout, build_plan(a, b), settings(world))
        for version in (1, 2):
            train.write(version)
            transfer.run(version)
            assert native.implementation() == "torch" and rollout.holds(version)


def test_without_the_compiled_copy() -> None:
    run_ranks(2, without_compiler)
