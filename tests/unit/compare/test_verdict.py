"""Who wins, and how sure that is; on runs whose step times are known."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from hybridengine.compare.arms import Arm
from hybridengine.compare.measured import Measured
from hybridengine.compare.verdict import difference, judge, resampled, tokens_per_second
from tests.unit.compare.recorded import measured

COLOCATED, PARTIAL, SPLIT = "colocated-sync-tp2", "colocated-partial-tp2", "disaggregated-1+1-sync"


def arms(*names: str) -> dict[str, Arm]:
    return {name: Arm.parse(name, ranks=2) for name in names}


def rounds(directory: Path, noise: float, **extra: float) -> dict[str, list[Measured]]:
    """Two rounds of each arm, named by what stands before and after the dash; seconds on top of each step."""
    names = {"sync": COLOCATED, "partial": PARTIAL, "split": SPLIT}
    return {
        names[key]: measured(directory, names[key], rounds=2, extra=seconds, noise=noise)
        for key, seconds in extra.items()
    }


def test_the_figure_is_a_ratio_of_sums(tmp_path: Path) -> None:
    """130 tokens per step; every step of a round takes the same time, the second round's steps a second more."""
    found = measured(tmp_path / "a", COLOCATED) + measured(tmp_path / "b", COLOCATED, extra=1.0)
    first = found[0].steps[0].seconds
    assert [step.tokens for step in found[0].steps] == [130.0] * 6
    assert tokens_per_second(found) == pytest.approx(12 * 130 / (6 * first + 6 * (first + 1.0)))


def test_a_clear_winner(tmp_path: Path) -> None:
    found = rounds(tmp_path, 0.02, sync=1.0, partial=0.0, split=2.0)
    verdict = judge(arms(*found), found)
    assert (verdict.winner, verdict.tied, verdict.confidence) == (PARTIAL, (PARTIAL,), 1.0)
    expected = tokens_per_second(found[PARTIAL]) / tokens_per_second(found[COLOCATED])
    assert verdict.margin == pytest.approx(expected) and verdict.interval is not None
    assert verdict.interval[0] < expected < verdict.interval[1] and verdict.interval[0] > 1.5


def test_no_difference_beyond_noise_goes_to_the_simplest(tmp_path: Path) -> None:
    """partial is 1 ms faster, and single steps vary by 300 ms: the answer is sync."""
    found = rounds(tmp_path, 0.3, sync=1.001, partial=1.0)
    verdict = judge(arms(*found), found)
    assert set(verdict.tied) == {COLOCATED, PARTIAL} and verdict.winner == COLOCATED
    assert verdict.margin is None and verdict.interval is None and 0.5 < verdict.confidence < 1.0


def test_a_tie_for_want_of_data_goes_to_the_fastest(tmp_path: Path) -> None:
    """partial is half a second faster, 20 %, and steps vary by 0.75 s: not sure, and yet sync is no better guess."""
    found = rounds(tmp_path, 0.75, sync=1.5, partial=1.0)
    verdict = judge(arms(*found), found)
    fastest = max(found, key=lambda name: tokens_per_second(found[name]))
    slowest = min(found, key=lambda name: tokens_per_second(found[name]))
    assert tokens_per_second(found[slowest]) < 0.95 * tokens_per_second(found[fastest])
    assert set(verdict.tied) == {COLOCATED, PARTIAL} and verdict.winner == fastest and verdict.confidence < 1.0


def test_the_same_runs_have_the_same_verdict(tmp_path: Path) -> None:
    found = rounds(tmp_path, 0.1, sync=0.1, partial=0.0)
    assert judge(arms(*found), found) == judge(arms(*found), found)


def test_what_disturbs_all_arms_alike_disturbs_no_ratio(tmp_path: Path) -> None:
    """One step of a round takes ten times as long in every arm: rates vary, their ratio hardly."""
    found = rounds(tmp_path, 0.0, sync=0.1, partial=0.0)
    slow = {
        name: [_slowed(one) if i == 0 else one for i, one in enumerate(runs)] for name, runs in found.items()
    }  # fmt: skip
    rates = resampled(slow, resamples=400)
    ratios = [a / b for a, b in zip(rates[PARTIAL], rates[COLOCATED], strict=True)]
    spread = (max(rates[PARTIAL]) - min(rates[PARTIAL])) / fmean(rates[PARTIAL])
    assert spread > 0.3
    assert (max(ratios) - min(ratios)) / fmean(ratios) < 0.2 * spread
    assert judge(arms(*slow), slow).tied == (PARTIAL,)


def _slowed(one: Measured) -> Measured:
    from dataclasses import replace

    steps = [replace(step, seconds=step.seconds * (10 if i == 2 else 1)) for i, step in enumerate(one.steps)]
    return replace(one, steps=steps)


def test_placement_and_schedule_are_told_apart(tmp_path: Path) -> None:
    names = ("colocated-sync", "colocated-partial", "colocated-sync-tp2", "disaggregated-1+1-sync",
             "disaggregated-1+1-async")  # fmt: skip
    found = {name: measured(tmp_path, name, extra=0.1 * i) for i, name in enumerate(names)}
    effects = judge(arms(*names), found).effects
    assert {(e.what, e.faster, e.slower) for e in effects} == {
        ("placement", "colocated-sync", "disaggregated-1+1-sync"),
        ("schedule", "disaggregated-1+1-sync", "disaggregated-1+1-async"),
        ("schedule", "colocated-sync", "colocated-partial"),
        ("rollout.tp", "colocated-sync", "colocated-sync-tp2"),
    }
    for effect in effects:
        expected = tokens_per_second(found[effect.faster]) / tokens_per_second(found[effect.slower])
        assert effect.ratio == pytest.approx(expected) and effect.beyond_noise and effect.ratio > 1.0


@pytest.mark.parametrize(
    ("arm", "base", "what"),
    [
        ("disaggregated-1+1-sync", "colocated-sync", "placement"),
        ("disaggregated-1+1-partial", "colocated-partial", None),
        ("disaggregated-1+1-sync", "colocated-sync-tp2", None),
        ("colocated-partial", "colocated-sync", "schedule"),
        ("disaggregated-1+1-async", "disaggregated-1+1-partial", None),
        ("colocated-sync-tp2", "colocated-sync", "rollout.tp"),
        ("colocated-sync", "colocated-sync-tp2", None),
        ("colocated-sync-static", "colocated-sync", "work stealing"),
        ("colocated-sync", "colocated-sync", None),
    ],
)
def test_one_difference_alone(arm: str, base: str, what: str | None) -> None:
    assert difference(Arm.parse(arm, ranks=2), Arm.parse(base, ranks=2)) == what


def test_arms_that_train_on_shorter_answers_are_marked(tmp_path: Path) -> None:
    fast = "disaggregated-1+1-async"
    found = {SPLIT: measured(tmp_path, SPLIT), fast: measured(tmp_path, fast, shorter=0.6)}
    assert judge(arms(SPLIT, fast), found).shorter == {fast: pytest.approx(0.6)}


def test_nothing_to_judge() -> None:
    with pytest.raises(ValueError, match="at least one arm"):
        judge({}, {})
