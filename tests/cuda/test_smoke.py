"""`make gpu-smoke`: its table, how a run is judged, what it writes; and, slowly, runs over the stand-ins."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_results import Row, write
from hybridengine.config.compose import build
from tests.gpu import smoke

CONDITIONS = {"device": "GPU A", "commit": "abcdef0123456", "versions": {"torch": "2.13.0"}}
DAY = datetime.date(2026, 12, 1)


@pytest.mark.parametrize("name", smoke.CHECKS)
@pytest.mark.parametrize("place", [smoke.ON_GPU, smoke.ON_STAND_IN], ids=["gpu", "stand-in"])
def test_every_check_is_a_configuration(name: str, place: tuple[str, ...]) -> None:
    check = smoke.CHECKS[name]
    config = build([*smoke.JOB, *place, *check.overrides])
    assert config.rollout.engine == "vllm" and config.rollout.tp == 1 and config.steps == smoke.STEPS
    assert (config.train.dtype == "bfloat16") == ("bfloat16" in name) == (check.closest == smoke.ROUNDED)
    assert config.rollout.enforce_eager == (not name.startswith("graphs"))
    assert (config.train.engine == "megatron") == name.startswith("megatron")


def test_what_is_compared_runs_before() -> None:
    names = list(smoke.CHECKS)
    for name, check in smoke.CHECKS.items():
        assert not check.same_as or names.index(check.same_as) < names.index(name)
    assert smoke.order(["megatron", "sleep-1"]) == ["quickstart", "sleep-1", "megatron"]
    assert smoke.order(["bfloat16"]) == ["bfloat16"]


def test_float32_checks_ask_triton_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keep their kernels apart from those that were compiled for tf32, whatever the caller has set."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    ieee, tf32 = (smoke.environment(smoke.CHECKS[name]) for name in ("graphs", "tf32"))
    assert (ieee["TRITON_F32_DEFAULT"], ieee["TRITON_CACHE_DIR"]) == ("ieee", "/cache-ieee")
    assert "TRITON_F32_DEFAULT" not in tf32 and tf32["TRITON_CACHE_DIR"] == "/cache"


# -- judging -------------------------------------------------------------------------------------------------


def record(step: int, **changes: float) -> dict[str, float]:
    values = {"loss": 0.5 / step, "grad_norm": 1.0, "reward": 0.1 * step, "completions/mean_length": 2.0}
    return {"step": step, **values, smoke.MISMATCH: 1e-6, **changes}


def finished(directory: Path, records: list[dict[str, float]]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"step": 0}, *records]))
    return directory


GOOD = [record(step) for step in range(1, smoke.STEPS + 1)]


def changed(step: int, **changes: float) -> list[dict[str, float]]:
    return [record(r["step"], **changes) if r["step"] == step else r for r in GOOD]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (GOOD, ""),
        (GOOD[:-1], r"steps \[1, 2, 3\] were recorded"),
        (changed(3, loss=float("nan")), "step 3: loss is nan"),
        (changed(2, grad_norm=0.0), "step 2: grad_norm is 0.0, must be a finite number above 0"),
        (changed(4, **{smoke.MISMATCH: 2e-4}), "differ by 0.0002, at most 0.0001"),
        (changed(2, loss=0.25 + 1e-9), "against quickstart: step 2: loss is 0.250000001, not 0.25"),
    ],
    ids=["good", "too-short", "not-a-number", "nothing-learned", "stale-weights", "another-curve"],
)
def test_judging(tmp_path: Path, records: list[dict[str, float]], problem: str) -> None:
    reference = finished(tmp_path / "reference", GOOD)
    wrong, note = smoke.judge(smoke.CHECKS["sleep-1"], finished(tmp_path / "run", records), reference)
    if not problem:
        assert (wrong, note) == ([], "log-probabilities within 1e-06, curves as quickstart's")
    else:
        assert any(re.search(problem, text) for text in wrong), wrong


def test_a_close_curve_is_close_enough_for_megatron(tmp_path: Path) -> None:
    reference = finished(tmp_path / "reference", GOOD)
    for name, by, passes in (("a", 9e-4, True), ("b", 2e-3, False), ("c", float("nan"), False)):
        run = finished(tmp_path / name, changed(2, reward=0.2 + by))
        assert (smoke.judge(smoke.CHECKS["megatron"], run, reference)[0] == []) == passes


# -- running -------------------------------------------------------------------------------------------------

#: A program that does what its overrides say: writes good metrics, fails, or hangs.
PROGRAM = """
import json, pathlib, sys, time
given = dict(a.split("=", 1) for a in sys.argv[1:])
if given["train.dtype"] == "fail":
    sys.exit("the end of the log")
if given["train.dtype"] == "hang":
    time.sleep(600)
out = pathlib.Path(given["output_dir"])
with (out / "metrics.jsonl").open("a") as file:
    have = len((out / "metrics.jsonl").read_text().splitlines())
    for step in range(have + 1, int(given["steps"]) + 1):
        file.write(json.dumps({"step": step, "loss": 1 / step, "grad_norm": 1.0, "reward": 0.5,
                               "completions/mean_length": 2.0, "sampling/logp_difference/max": 0.0}) + "\\n")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> smoke.Place:
    (tmp_path / "smoke_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = (f"steps={smoke.STEPS}",)
    return smoke.Place(module="smoke_program", job=job, output=tmp_path / "out", seconds=60, device="none")


def carry_out(place: smoke.Place, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, **options: Any) -> Row:
    check = smoke.Check(what="a run", overrides=(f"train.dtype={dtype}",), **options)
    monkeypatch.setitem(smoke.CHECKS, name, check)
    return smoke.carry_out(name, place, {})


def test_a_run_that_is_resumed(place: smoke.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is started twice over one directory, and every step is there once."""
    row = carry_out(place, monkeypatch, "it", "good", resumed=True)
    assert (row.status, row.note) == ("pass", "log-probabilities within 0")


def test_a_run_that_fails(
    place: smoke.Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = carry_out(place, monkeypatch, "it", "fail")
    assert row.status == "fail" and "exit status 1" in row.note and str(place.output / "it.log") in row.note
    assert "| the end of the log" in capsys.readouterr().out


def test_a_run_that_hangs_is_killed(place: smoke.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    row = carry_out(dataclasses.replace(place, seconds=1), monkeypatch, "it", "hang")
    assert row.status == "fail" and "none within 1 s" in row.note and row.seconds < 20


def test_a_comparison_with_a_failed_check_is_not_run(place: smoke.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    row = carry_out(place, monkeypatch, "it", "good", same_as="quickstart")
    assert row.status == "fail" and "not run: quickstart" in row.note


# -- results -------------------------------------------------------------------------------------------------


def test_results_of_a_day_are_kept_together(tmp_path: Path) -> None:
    """A second call replaces what it ran, and leaves what it did not; another device starts anew."""

    def call(*rows: tuple[str, str], **conditions: str) -> dict[str, dict[str, Any]]:
        made = [Row(name=n, what="w", status=s, seconds=1.0, note=f"{n} | {s}") for n, s in rows]
        page = write(tmp_path, "gpu-smoke", DAY, made, CONDITIONS | conditions, order=["a", "b", "c"])
        assert page.name == "gpu-smoke-2026-12-01.md"
        found = json.loads(page.with_suffix(".json").read_text())["rows"]
        assert [row["name"] for row in found] == sorted(row["name"] for row in found)
        assert page.read_text().count("| w |") == len(found)
        return {row["name"]: row for row in found}

    call(("b", "fail"), ("a", "pass"))
    found = call(("b", "pass"), ("c", "not run"), ("a", "not run"), commit="another")
    assert {name: row["status"] for name, row in found.items()} == {"a": "pass", "b": "pass", "c": "not run"}
    assert (found["a"]["commit"], found["b"]["commit"]) == ("abcdef0123456", "another")
    assert set(call(("c", "pass"), device="GPU B")) == {"c"}
    assert "GPU B; torch 2.13.0" in (tmp_path / "gpu-smoke-2026-12-01.md").read_text()


def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, problem in (
        ([], "needs a CUDA GPU"),
        (["--only", "nothing"], "no such check; there are quickstart"),
    ):
        with pytest.raises(SystemExit) as ended:
            smoke.main(arguments)
        assert ended.value.code == 2 and problem in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.engine
def test_over_the_stand_ins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every check that needs no GPU passes; the others say that they do."""
    status = smoke.main(["--stand-in", "--output", str(tmp_path)])
    outcome = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert status == 0, outcome
    gpu_only = sum(not check.stand_in for check in smoke.CHECKS.values())
    assert (outcome["failed"], outcome["not_run"]) == (0, gpu_only)
    assert outcome["passed"] == len(smoke.CHECKS) - gpu_only
    assert sorted(path.suffix for path in tmp_path.glob("gpu-smoke-*")) == [".json", ".md"]
