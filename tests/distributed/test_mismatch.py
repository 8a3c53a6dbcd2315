"""Mismatch over ranks, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from hybridengine.distributed.world import World
from hybridengine.mismatch import Mismatch
from hybridengine.types import Sample
from tests.distributed.ranks import run_ranks

NAN = float("nan")
#: Per rank: (rollout, trainer, version of each token). The policy's version is 5.
TOKENS = [
    [([-1.0, -2.0, -3.0], [-1.5, -1.0, -3.25], [5, 5, 4])],
    [([-1.0], [-3.0], [5]), ([-4.0, NAN], [-4.0, -1.0], [5, 5])],
]


def _reduce(world: World) -> dict[str, float]:
    mismatch = Mismatch(5)
    for rollout, trainer, versions in TOKENS[world.rank]:
        size = len(rollout)
        sample = Sample(
            prompt_ids=[1], response_ids=[2] * size, loss_mask=[True] * size, advantages=[0.0] * size,
            rollout_logprobs=rollout, versions=versions,
        )  # fmt: skip
        mismatch.add([sample], [trainer])
    return mismatch.reduce()


def test_over_two_ranks() -> None:
    """Of version 5 and no NaN: .5, 1 on rank 0; 2, 0 on rank 1: mean 3.5 / 4, largest 2, one of six tokens is older and
    one has no number: 4 of 6 compared."""
    for found in run_ranks(2, _reduce):
        assert found["sampling/logp_difference/mean"] == pytest.approx(0.875)
        assert found["sampling/logp_difference/max"] == 2.0
        assert found["sampling/off_policy_tokens"] == pytest.approx(1 / 3)


def _nothing(world: World) -> dict[str, float]:
    return Mismatch(0).reduce()


def test_nothing_compared() -> None:
    assert run_ranks(2, _nothing) == [{}, {}]
