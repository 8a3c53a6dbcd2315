"""Weight transfers between processes that share one GPU: CUDA IPC, streams that follow words, staged casts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.transfers import SCENES, alone, check_casualty, matrix, stopped
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("small", [False, True], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize(("size", "method"), [(2, "pull"), (3, "pull"), (2, "gather")])
def test_every_layout_and_dtype(size: int, method: str, small: bool) -> None:
    run_ranks(size, matrix, method, small, timeout=240)


@pytest.mark.parametrize("scene", SCENES, ids=lambda f: f.__name__)
def test_order_and_damage(scene) -> None:
    run_ranks(2, scene, timeout=120)


def test_peer_killed_in_midpull(tmp_path: Path) -> None:
    check_casualty(tmp_path)


def test_peer_that_does_not_come() -> None:
    assert "rank 1 did not publish its weights within 1 s" in run_ranks(2, stopped)[0]


@pytest.mark.parametrize("method", ["pull", "gather"])
def test_one_rank_whose_tensors_move(method: str) -> None:
    run_ranks(1, alone, method, timeout=120)
