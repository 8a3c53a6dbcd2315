"""The cases of bench_reshard: what their names mean, and what moves in them."""

from __future__ import annotations

import pytest

from benchmarks.bench_reshard import Case

NAMES = ("dense-n2-tp2-float32", "dense-pp2-tp2-float32", "moe-n4-tp1-bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept(name: str) -> None:
    assert Case.parse(name).name == name


@pytest.mark.parametrize("name", ["dense-tp2-float32", "large-n2-tp2-float32", "dense-pp2-tp2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="model-ppP-tpT-dtype"):
        Case.parse(name)


def test_pipeline_stages_exchange_half_of_what_a_rank_serves() -> None:
    """Each of two ranks trains half of the layers and serves half of every layer."""
    plan = Case.parse("dense-pp2-tp2-float32").plan()
    for rank in range(2):
        held = plan.received_bytes(rank) + plan.local_bytes(rank)
        assert plan.received_bytes(rank) == plan.minimum_bytes(rank)
        assert 0.49 < plan.received_bytes(rank) / held < 0.51
