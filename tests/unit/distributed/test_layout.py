"""RolloutLayout: who is in which replica, for any number of ranks."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.distributed import layout
from hybridengine.distributed.layout import RolloutLayout


def test_eight_ranks_at_tp_2_worked_by_hand() -> None:
    eight = RolloutLayout(8, 2)
    assert str(eight) == "8 ranks = 4 replicas × TP 2"
    assert eight.num_replicas == 4 and eight.leaders == (0, 2, 4, 6)
    assert [eight.replica_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [eight.tp_rank_of(rank) for rank in range(8)] == [0, 1] * 4
    assert [rank for rank in range(8) if eight.is_leader(rank)] == [0, 2, 4, 6]


@given(st.integers(1, 512).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))))
def test_every_rank_is_in_one_place(sizes: tuple[int, int]) -> None:
    size, tp = sizes
    if size % tp:
        with pytest.raises(ValueError, match=rf"^rollout\.tp={tp}: must divide the {size} ranks that generate"):
            RolloutLayout(size, tp)
        return
    found = RolloutLayout(size, tp)
    places = [(found.replica_of(rank), found.tp_rank_of(rank)) for rank in range(size)]
    assert places == [(replica, tp_rank) for replica in range(found.num_replicas) for tp_rank in range(tp)]
    for replica, leader in enumerate(found.leaders):
        ranks = [rank for rank in range(size) if found.replica_of(rank) == replica]
        assert ranks[0] == leader and len(ranks) == tp
        assert [found.is_leader(rank) for rank in ranks] == [True] + [False] * (tp - 1)


@pytest.mark.parametrize("tp", [0, -1])
def test_no_size_at_all(tp: int) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.tp={tp}: must divide the 6 ranks.*\[1, 2, 3, 6\]"):
        RolloutLayout(6, tp)


def test_the_examples_are_true() -> None:
    assert doctest.testmod(layout).failed == 0
