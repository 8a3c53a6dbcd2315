"""The transfers of tests/gpu on streams that are threads: what the program does not order shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.transfers import SCENES, alone, check_casualty, matrix, stopped
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize(("size", "small"), [(2, True), (3, False)], ids=["2ranks-many-buckets", "3ranks-one-bucket"])
def test_every_layout_and_dtype(size: int, small: bool) -> None:
    run_ranks(size, matrix, "pull", small, timeout=240)


@pytest.mark.parametrize("scene", SCENES, ids=lambda f: f.__name__)
def test_order_and_damage(scene) -> None:
    run_ranks(2, scene, timeout=60)


def test_peer_killed_in_midpull(tmp_path: Path) -> None:
    check_casualty(tmp_path)


def test_peer_that_does_not_come() -> None:
    assert "rank 1 did not publish its weights within 1 s" in run_ranks(2, stopped)[0]


def test_one_rank_whose_tensors_move() -> None:
    run_ranks(1, alone, "pull")
