"""Weight handoffs over real gloo processes: every element is its canonical index, so one wrong one shows."""

from __future__ import annotations

import pytest

from hybridengine.distributed.world import World
from hybridengine.handoff.base import HandoffSettings
from hybridengine.handoff.registry import HANDOFFS, make_handoff
from hybridengine.reshard.plan import build_plan
from tests.distributed.layouts import Cut, Holder, layout, only, shard, tensor_parallel
from tests.distributed.ranks import run_ranks

SOURCES = {"rows": 0, "cols": 1}
TARGETS = {"tp1": (1, 0), "tp2-rows": (2, 0), "tp2-cols": (2, 1), "rank0-only": None}


def target_cut(name: str) -> Cut:
    spec = TARGETS[name]
    return only({0}) if spec is None else tensor_parallel(*spec)


def settings(world: World, **kwargs) -> HandoffSettings:
    return HandoffSettings(world=world, timeout_seconds=20, **kwargs)


def matrix(world: World, bucket_bytes: int | None) -> None:
    """All layouts, dtypes and methods in one job: starting processes is what costs."""
    for method in HANDOFFS:
        for source_dim in SOURCES.values():
            for target, spec in TARGETS.items():
                if spec is not None and spec[0] > world.size:
                    continue
                for dtype, transposed in (("float32", False), ("bfloat16", False), ("float32", True)):
                    a = layout(shard(source_dim), world.size, "float32")
                    b = layout(target_cut(target), world.size, dtype, transposed=transposed)
                    plan = build_plan(a, b)
                    train, rollout = Holder(a, world.rank, fill=0), Holder(b, world.rank)
                    chosen = settings(world)
                    if bucket_bytes is not None:
                        chosen.__class__ = Tiny
                        Tiny.size = bucket_bytes
                    handoff = make_handoff(method, train, rollout, plan, chosen)
                    for version in (1, 2):
                        train.write(version)
                        train.version = version
                        report = handoff.sync(version)
                        where = (method, source_dim, target, dtype, transposed, version)
                        assert rollout.holds(version), where
                        assert report.version == version and report.method == method
                        if method != "gather":
                            assert report.bytes_received == report.bytes_minimum == plan.minimum_bytes(world.rank), (
                                where
                            )
                            assert report.extra_bytes <= chosen.bucket_bytes, where
                            assert report.full_check == (version == 1), where
                        if method == "pull" and dtype == "float32":
                            assert report.extra_bytes == 0, where
                    handoff.close()


class Tiny(HandoffSettings):
    """Buckets far smaller than a parameter: many rounds, tensors cut across chunks."""

    __slots__ = ()
    size = 0

    @property
    def bucket_bytes(self) -> int:
        return self.size


@pytest.mark.parametrize("bucket_bytes", [None, 1536], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("size", [1, 2, 4], ids=["1rank", "2ranks", "4ranks"])
def test_every_layout_dtype_and_method(size: int, bucket_bytes: int | None) -> None:
    run_ranks(size, matrix, bucket_bytes)
