"""The cases of bench_reshard: what their names mean, and what moves in them."""

from __future__ import annotations

import pytest

from benchmarks.bench_reshard import DEFAULT_CASES, Case, parse

NAMES = ("dense-n2-tp2-float32", "dense-pp2-tp2-float32", "moe-n4-tp1-bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept(name: str) -> None:
    assert Case.parse(name).name == name


@pytest.mark.parametrize("name", ["dense-tp2-float32", "large-n2-tp2-float32", "dense-pp2-tp2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="model-ppP-tpT-dtype"):
        Case.parse(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "foo"], "--cases 'foo' is not model-nN-tpT-dtype or model-ppP-tpT-dtype, model in ['dense',"),
        (["--cases", NAMES[0], "dense-n2-tp2-float16"], "'dense-n2-tp2-float16': an engine's dtype is one of float32,"),
        (["--cases", "dense-n3-tp2-float32"], "'dense-n3-tp2-float32': tp2 must divide the 3 rank(s)"),
        (["--cases", "dense-n0-tp1-float32"], "'dense-n0-tp1-float32': tp1 must divide the 0 rank(s)"),
        (["--cases", "smollm2-n2-tp2-float32"], "tp2 must divide heads and widths of smollm2; possible: [1, 3]"),
        (["--cases", "dense-pp3-tp1-float32"], "'dense-pp3-tp1-float32': pp3 must divide the 8 layers of dense"),
        (["--rounds", "0"], "--rounds 0: must be 1 or more"),
    ],
)
def test_refused_before_anything_is_measured(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_what_is_measured() -> None:
    assert [case.name for case in parse([]).cases] == list(DEFAULT_CASES)
    assert len(parse(["--full"]).cases) == 33  # 2 models x (N 2: 2, N 4 and 8: 3 TPs each) x 2 dtypes, and the main one


def test_every_option_is_explained(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "model: smollm2, dense, moe; dtype of the engine: float32, bfloat16" in told
    assert "--rounds ROUNDS times that every arm" in told


def test_pipeline_stages_exchange_half_of_what_a_rank_serves() -> None:
    """Each of two ranks trains half of the layers and serves half of every layer."""
    plan = Case.parse("dense-pp2-tp2-float32").plan()
    for rank in range(2):
        held = plan.received_bytes(rank) + plan.local_bytes(rank)
        assert plan.received_bytes(rank) == plan.minimum_bytes(rank)
        assert 0.49 < plan.received_bytes(rank) / held < 0.51
