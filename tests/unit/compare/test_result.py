"""What a comparison says: rows, sentence, forecasts, page, JSON; and ``--from``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridengine.compare import gantt
from hybridengine.compare.__main__ import main
from hybridengine.compare.arms import Arm
from hybridengine.compare.forecast import errors, scenario_of
from hybridengine.compare.load import FALLBACK, load
from hybridengine.compare.measured import Measured, idle_shares, measure, read_trace, rollout_rate
from hybridengine.compare.page import render
from hybridengine.compare.plan import Plan, Settings
from hybridengine.compare.result import Report, make_report, notes, sentence
from hybridengine.compare.run import Comparison
from hybridengine.simulate.calibrate import read_run
from tests.unit.compare.recorded import WARMUP, Launcher, measured, record

NAMES = ("colocated-sync-tp2", "colocated-partial-tp2", "disaggregated-1+1-sync", "disaggregated-1+1-async")


def report(directory: Path, *, names: tuple[str, ...] = NAMES, step: float = 1.0, **changes: Any) -> Report:
    """Each arm is ``step`` seconds slower per step than the one before."""
    rounds = {name: measured(directory, name, extra=step * i, rounds=2) for i, name in enumerate(names)}
    return make_report({name: Arm.parse(name, ranks=2) for name in names}, rounds, **changes)


# -- one run ---------------------------------------------------------------------------------------


def test_a_run_is_read(tmp_path: Path) -> None:
    arm = Arm.parse("colocated-sync-tp2", ranks=2)
    found = measure(arm.name, record(tmp_path / "run", arm, steps=6), skip=WARMUP, host_gib=1.5)
    assert found.run.skipped == WARMUP and found.run.scenario.ranks == 2
    assert found.idle == {"all": 0.0}  # one replica: nobody to wait for
    assert [step.reward for step in found.steps] == [0.3, 0.4, 0.5, 0.6]
    assert found.seconds == pytest.approx(4 * found.run.seconds_per_step)
    assert found.sync_share == pytest.approx(0.2 / found.run.seconds_per_step)
    assert (found.staleness, found.dropped_groups, found.host_gib) == ((0.5, 1.0), 2.0, 1.5)
    spans, replicas, first = read_trace(tmp_path / "run", skip=WARMUP)
    assert (len(spans), len(replicas[0]), first) == (12, 6, 2.0 * WARMUP)


def test_too_few_steps_and_missing_files(tmp_path: Path) -> None:
    arm = Arm.parse("colocated-sync-tp2", ranks=2)
    with pytest.raises(ValueError, match="needs more than 4 steps"):
        measure(arm.name, record(tmp_path / "run", arm, steps=4), skip=4)
    with pytest.raises(ValueError, match="config.json: missing"):
        measure(arm.name, tmp_path / "nowhere", skip=1)


def test_rollout_rate_is_over_the_slowest_replica() -> None:
    """Two rollouts of two replicas: 30 and 10 tokens in 2 s, then 20 and 20 in 3 s."""

    def window(busy: list[list[float]], running: int, count: int) -> dict[str, Any]:
        return {"busy": busy, "decode": {running: [count, 0, 0, 0, 0]}, "prefill": {}}

    first = [window([[0.0, 2.0]], 10, 3), window([[10.0, 12.0]], 20, 1)]
    second = [window([[0.5, 1.0]], 5, 2), window([[9.0, 9.5], [9.6, 11.0]], 4, 5)]
    assert rollout_rate([first, second]) == pytest.approx((30 + 10 + 20 + 20) / (2 + 3))


def test_idle_shares(tmp_path: Path) -> None:
    """Two colocated replicas, the second ready 1 s before the first in each of two rollouts, 10 s in all: 1 s each."""
    run = read_run(record(tmp_path / "run", Arm.parse("colocated-sync-tp2", ranks=2)))
    ends = [{"busy": [[0.0, 3.0]]}, {"busy": [[5.0, 8.0]]}], [{"busy": [[0.0, 2.0]]}, {"busy": [[5.0, 7.0]]}]
    shares = idle_shares(run, list(ends), [], {}, since=0.0, wall=10.0, sync=0.0)
    assert shares == {"all": pytest.approx(0.1)}


def test_reward_after_equal_time(tmp_path: Path) -> None:
    """Six counted steps with rewards 0.3 to 0.8; after three of them the mean is 0.4."""
    (found,) = measured(tmp_path, "colocated-sync-tp2")
    assert found.reward_until(float("inf")) == pytest.approx(0.7)
    assert found.reward_until(3 * found.steps[0].seconds) == pytest.approx(0.4)
    assert found.reward_until(0.5 * found.steps[0].seconds) is None


# -- the simulator ---------------------------------------------------------------------------------


def test_the_simulator_is_right_on_recorded_runs(tmp_path: Path) -> None:
    """write_run's step times follow its costs exactly; from sync the error is what the other arm's costs differ by."""
    names = ("colocated-sync-tp2", "colocated-partial-tp2")
    rounds = {name: measured(tmp_path, name, extra=0.5 * i) for i, name in enumerate(names)}
    found = errors({name: Arm.parse(name, ranks=2) for name in names}, rounds)
    assert abs(found[names[0]].own) < 1e-6 and found[names[0]].from_sync is None
    seconds = [rounds[name][0].run.seconds_per_step for name in names]
    assert found[names[1]].from_sync is not None and found[names[1]].from_sync < -0.2
    assert seconds[1] == pytest.approx(seconds[0] + 0.5)


def test_a_scenario_of_an_arm_that_was_not_run(tmp_path: Path) -> None:
    like = read_run(record(tmp_path / "run", Arm.parse("colocated-sync-tp2", ranks=2))).scenario
    arm = Arm.parse("disaggregated-1+3-async_in_order", ranks=4)
    found = scenario_of(arm, like)
    assert found.name == arm.name and found.pool().in_order and found.prompts == like.prompts


# -- the report ------------------------------------------------------------------------------------


def test_the_json_has_what_is_promised(tmp_path: Path) -> None:
    found = report(tmp_path, left_out={"colocated-sync-tp4": "no room"}, failed={"x": "gone"}).as_dict()
    assert {"arms", "winner", "margin", "confidence", "simulator_error_max", "left_out", "failed"} <= found.keys()
    assert (found["winner"], found["confidence"]) == (NAMES[0], 1.0) and found["margin"] > 1.5
    assert [arm["name"] for arm in found["arms"]] == list(NAMES)
    assert found["train_with"].startswith("placement.name=colocated schedule.name=sync rollout.tp=2")
    arm = found["arms"][0]
    assert {
        "tokens_per_second", "samples_per_second", "seconds_per_phase", "idle", "sync_share", "host_gib", "device_gib",
        "staleness_mean", "response_length", "reward_equal_time", "tokens",
    } <= arm.keys()  # fmt: skip
    assert arm["samples_per_second"] == pytest.approx(4 / arm["seconds_per_step"], rel=1e-4)
    assert json.loads(json.dumps(found)) == found and "NaN" not in json.dumps(found)


def test_the_sentence_says_who_why_and_how_sure(tmp_path: Path) -> None:
    found = report(tmp_path)
    text = sentence(found)
    assert re.match(r"Train with colocated-sync-tp2: \d+ tokens/s; \d\.\d\d× colocated-partial-tp2 \(95 %: ", text)
    assert "whose optimizer takes 1.1 s of a step, the winner's 0.1 s" in text
    assert text.endswith("It is the fastest, or within 5% of it, in 100% of 2000 resamples.")


def test_the_sentence_of_a_tie(tmp_path: Path) -> None:
    text = sentence(report(tmp_path, names=NAMES[:2], step=0.0))
    assert (
        text.startswith("Train with colocated-sync-tp2") and "no difference beyond noise to colocated-partial" in text
    )
    assert text.endswith("in 100% of 2000 resamples. More --rounds would tell them apart, if there is a difference.")
    assert sentence(report(tmp_path / "one", names=NAMES[:1])).endswith("No other arm ran.")


def test_an_arm_that_trains_on_shorter_answers_is_marked(tmp_path: Path) -> None:
    rounds = {
        NAMES[2]: measured(tmp_path, NAMES[2], extra=3.0),
        NAMES[3]: measured(tmp_path, NAMES[3], shorter=0.5),
    }
    found = make_report({name: Arm.parse(name, ranks=2) for name in rounds}, rounds)
    assert found.rows[0].name == NAMES[3] and found.rows[0].shorter == pytest.approx(0.5)
    assert "50% as long as the synchronous arms': it trains on other work" in sentence(found)
    assert any("schedule.order=start" in note for note in notes(found))
    assert any("differ by up to" in note for note in notes(found))


def test_the_page_has_everything_and_needs_nothing_else(tmp_path: Path) -> None:
    found = report(tmp_path, failed={"colocated-sync": "<b>Error</b>"}, left_out={"colocated-partial": "no room"})
    page = render(found, job="model.path=/m data.train=d")
    for name in NAMES:
        assert page.count(name) >= 3  # table, phases, picture
    assert page.count("data:image/svg+xml;base64,") == len(NAMES)
    assert (
        "hybridengine train model.path=/m data.train=d placement.name=colocated schedule.name=sync rollout.tp=2" in page
    )
    assert "&lt;b&gt;Error" in page and "<b>Error" not in page and "no room" in page
    assert not re.search(r"(src|href)=.(http|/)", page)
    gantt.write_png(tmp_path / "gantt.png", found.last)
    assert (tmp_path / "gantt.png").stat().st_size > 10_000


# -- from finished runs ----------------------------------------------------------------------------


def comparison(out: Path, **changes: Any) -> Path:
    from rich.console import Console

    arms = [Arm.parse(name, ranks=2) for name in NAMES]
    settings = Settings(job=("+experiment=quickstart",), ranks=2, steps=6, warmup=2, out=out)
    Comparison(settings, Plan(arms=arms), Console(quiet=True), launch=Launcher(**changes)).run()
    return out


def test_the_verdict_again_from_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = comparison(tmp_path / "out", extra={NAMES[0]: 1.0, NAMES[2]: 1.0, NAMES[3]: 1.0})
    assert main(["--from", str(out)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found["winner"] == NAMES[1] and len(found["arms"]) == 4 and found["forecasts"]
    assert json.loads((out / "compare.json").read_text()) == found
    assert (out / "compare.html").is_file() and (out / "gantt.png").is_file()
    assert (
        "hybridengine train +experiment=quickstart placement.name=colocated schedule.name=partial rollout.tp=2"
        in printed.err
    )


def test_any_finished_runs_can_be_compared(tmp_path: Path) -> None:
    places = []
    for i, name in enumerate(NAMES[:3]):
        places.append(record(tmp_path / f"run{i}", Arm.parse(name, ranks=2), extra=float(i)))
    arms, runs, out, job = load(places, warmup=2)
    assert list(arms) == list(runs.rounds) == list(NAMES[:3]) and (out, job) == (FALLBACK, "")
    assert isinstance(runs.rounds[NAMES[0]][0], Measured)


def test_directories_that_hold_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(tmp_path)]) == 2
    assert "config.json: missing" in capsys.readouterr().err


def test_the_command_refuses_what_can_t_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["+experiment=quickstart", "beta=1"]) == 2 and "unknown key 'beta'" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "out")]
    assert main([*out, "--ranks", "2", "+experiment=quickstart", "--arms", "colocated-x"]) == 2
    assert "no arm 'colocated-x': x: no such schedule" in " ".join(capsys.readouterr().err.split())
    assert main([*out, "+experiment=quickstart", "--steps", "1"]) == 2
    assert "--steps 1: must be 3 or more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_plan_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--plan", "--ranks", "2", "--out", str(tmp_path / "out"), "+experiment=quickstart", "rollout=transformers"]
    assert main(given) == 0
    shown = capsys.readouterr().err
    assert "colocated-sync: placement.name=colocated schedule.name=sync rollout.tp=1" in shown
    assert "colocated-sync-tp2: left out: rollout.tp=2" in shown and not (tmp_path / "out").exists()
