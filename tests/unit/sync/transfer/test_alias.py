"""Which engine tensors can be the trainer's own memory: those that are it element for element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.plan.strided import Strided
from hybridengine.sync.transfer.alias import Alias, find_aliases


def copy(rows: int = 2, *, at: int = 0, reads: int = 8, source: str = "shard", rank: int = 0, dtype: str = "float32",
         strides: tuple[int, int] = (4, 1)) -> Copy:  # fmt: skip
    """``rows`` rows of 4 that lie from ``reads`` on in the trainer's tensor, and from ``at`` on in the engine's."""
    box = Strided((rows, 4), reads, strides, at, (4, 1), at, (4, 1))
    return Copy("p", rank, 0, source, "weight", box, dtype, "float32")


@pytest.mark.parametrize(
    ("copies", "aliased"),
    [
        ([copy()], True),
        ([copy(1), copy(1, at=4, reads=12)], True),
        ([copy(1)], False),  # the other row comes from nowhere
        ([copy(dtype="bfloat16")], False),
        ([copy(strides=(1, 2))], False),  # transposed
        ([copy(rank=1)], False),
        ([copy(1), copy(1, at=4, reads=16)], False),  # a gap
        ([copy(1), copy(1, at=4, reads=12, source="other")], False),
    ],
    ids=["whole", "in-two-parts", "a-part", "dtype", "strides", "another-rank", "gap", "two-tensors"],
)
def test_what_is_aliased(copies: list[Copy], aliased: bool) -> None:
    plan = cast(ReshardPlan, cast(Any, SimpleNamespace(copies=lambda rank: copies)))
    found = find_aliases(plan, 0, {"weight": torch.zeros(2, 4)})
    assert found == ({"weight": Alias("weight", "shard", 8)} if aliased else {})


def test_the_view_is_the_trainer_s_memory() -> None:
    shard, live = torch.arange(24.0), torch.zeros(2, 4)
    view = Alias("weight", "shard", 8).view({"shard": shard}, {"weight": live})
    assert view.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert view.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
