"""Rounds, budget, failures, interruptions; with recorded runs in the place of torchrun's."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybridengine.compare.arms import Arm
from hybridengine.compare.launch import read_result
from hybridengine.compare.plan import Plan, Settings, estimate, within_budget
from hybridengine.compare.run import Comparison, Runs
from hybridengine.config.schema import ConfigError
from tests.unit.compare.recorded import Launcher, measured

ARMS = ("colocated-sync-tp2", "disaggregated-1+1-sync", "colocated-partial-tp2")


def settings(out: Path, **changes: Any) -> Settings:
    given: dict[str, Any] = {"job": ("+experiment=quickstart",), "ranks": 2, "steps": 6, "warmup": 2, "out": out}
    return Settings(**given | changes)


def compare(out: Path, launcher: Launcher, *, arms: tuple[str, ...] = ARMS, **changes: Any) -> tuple[Runs, str]:
    shown = io.StringIO()
    plan = Plan(arms=[Arm.parse(name, ranks=2) for name in arms])
    comparison = Comparison(settings(out, **changes), plan, Console(file=shown, width=200), launch=launcher)
    return comparison.run(), shown.getvalue()


def test_arms_take_turns_and_turn_around(tmp_path: Path) -> None:
    launcher = Launcher()
    runs, shown = compare(tmp_path / "out", launcher, rounds=3)
    first, second, third = ARMS
    assert launcher.calls == [
        (first, 0), (second, 0), (third, 0), (third, 1), (second, 1), (first, 1), (first, 2), (second, 2), (third, 2),
    ]  # fmt: skip
    assert {name: len(found) for name, found in runs.rounds.items()} == dict.fromkeys(ARMS, 3)
    assert all("steps=8" in job and job[0] == "+experiment=quickstart" for job in launcher.jobs)
    assert len(runs.rounds[first][0].steps) == 6
    assert re.search(r"3 arms × 3 round\(s\) × \(2 \+ 6 steps\): about 1\.[45] of 15 minutes", shown)


def test_a_failed_arm_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    launcher = Launcher(fails={ARMS[1]: "Traceback\nMemoryError: no room"})
    runs, shown = compare(tmp_path / "out", launcher)
    assert [name for name, _ in launcher.calls].count(ARMS[1]) == 1
    assert runs.failed == {ARMS[1]: "Traceback\nMemoryError: no room"} and set(runs.rounds) == {ARMS[0], ARMS[2]}
    assert f"failed {ARMS[1]} after 10 s: MemoryError: no room" in shown


def test_the_first_arm_fails_and_the_next_one_tells_the_time(tmp_path: Path) -> None:
    runs, _ = compare(tmp_path / "out", Launcher(fails={ARMS[0]: "no"}), rounds=1)
    assert set(runs.rounds) == set(ARMS[1:]) and set(runs.failed) == {ARMS[0]}


def test_all_fail_with_the_same_error(tmp_path: Path) -> None:
    error = "hybridengine: data.train=d.jsonl: no such file"
    with pytest.raises(ConfigError, match=f"every arm failed, with the same error:\n{error}"):
        compare(tmp_path / "out", Launcher(fails=dict.fromkeys(ARMS, error)))


@pytest.mark.parametrize("interrupted_at", [1, 2, 5])
def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path: Path, interrupted_at: int) -> None:
    first, out = Launcher(interrupted_at=interrupted_at), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compare(out, first)
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert len(finished) == interrupted_at - 1
    second = Launcher()
    runs, _ = compare(out, second)
    assert sorted([*first.calls[:-1], *second.calls]) == sorted((name, i) for name in ARMS for i in range(2))
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert {name: len(found) for name, found in runs.rounds.items()} == dict.fromkeys(ARMS, 2)
    third = Launcher()
    compare(out, third)
    assert third.calls == []


def test_more_rounds_of_the_same(tmp_path: Path) -> None:
    compare(tmp_path / "out", Launcher(), rounds=1)
    launcher = Launcher()
    compare(tmp_path / "out", launcher, rounds=2)
    assert {number for _, number in launcher.calls} == {1}


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(out, Launcher(), rounds=1)
    with pytest.raises(ConfigError, match="another comparison: steps was 6, now 7.\n  --out DIR"):
        compare(out, Launcher(), steps=7)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.bin").touch()
    with pytest.raises(ConfigError, match="not empty, and no comparison"):
        compare(tmp_path / "mine", Launcher())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["model.bin"]


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    """100 s a run, 2 rounds: 7 minutes have room for two of three arms."""
    launcher = Launcher(seconds=100.0)
    runs, shown = compare(tmp_path / "out", launcher, minutes=7.0)
    assert set(runs.rounds) == set(ARMS[:2]) and len(launcher.calls) == 4
    assert runs.left_out[ARMS[2]] == "no time within --minutes 7; all arms would take about 10"
    assert "left out: no time within" in shown


@pytest.mark.parametrize(
    ("minutes", "arms", "rounds"), [(6.0, 3, 2), (5.9, 2, 2), (4.0, 2, 2), (3.9, 3, 1), (1.0, 2, 1)]
)
def test_within_budget(minutes: float, arms: int, rounds: int) -> None:
    """A minute a run, two rounds wanted: as many arms as that leaves, two at least, else one round."""
    wanted = [Arm.parse(name, ranks=2) for name in ARMS]
    kept, number = within_budget(wanted, lambda _: 60.0, rounds=2, seconds=60 * minutes, spent={})
    assert (len(kept), number) == (arms, rounds) and kept == wanted[:arms]


def test_an_estimate_is_start_and_simulated_steps(tmp_path: Path) -> None:
    """The pilot took 20 s for 8 steps; an arm like it takes as long, one that was run takes what it took."""
    arm = Arm.parse(ARMS[0], ranks=2)
    (one,) = measured(tmp_path, arm.name)
    one.run.scenario = one.run.scenario.with_(ranks=2, tp=2)
    assert estimate(arm, {}, None, steps=8) is None
    assert estimate(arm, {arm.name: [10.0, 30.0]}, (arm.name, one.run), steps=8) == 20.0
    like = Arm.parse("colocated-partial-tp2", ranks=2)
    found = estimate(like, {arm.name: [20.0], "failed at once": [1.0]}, (arm.name, one.run), steps=8)
    assert found == pytest.approx(20.0, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 2}, "--steps 2: must be 3 or more"),
        ({"rounds": 0}, "--rounds 0: must be 1 or more"),
        ({"warmup": 0}, "--warmup 0: must be 1 or more"),
        ({"ranks": 0}, "--ranks 0: must be 1 or more"),
        ({"minutes": 0.0}, "--minutes 0: must be greater than 0"),
    ],
)
def test_options_that_can_t_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


def test_a_result_is_written_whole(tmp_path: Path) -> None:
    Launcher()(
        Arm.parse(ARMS[0], ranks=2), [], tmp_path / "run", method="auto", round=1, timeout=1.0
    )  # fmt: skip
    found = read_result(tmp_path / "run")
    assert found is not None and (found.arm, found.round, found.status) == (ARMS[0], 1, 0)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seconds"] == 10.0
    assert read_result(tmp_path) is None
