"""bench_gpu and bench_bill: their parts, the job, the bill and the figures; runs need a GPU or half a minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_bill, bench_gpu
from hybridengine.tools.bill import GIB

DEVICE = {"rows": [{"what": "pull, TP 1, float32 to bfloat16", "over_floor": 1.234, "seconds": 1e-3}]}
SLEEP = {"over_plain_copy": {"optimizer": {"link": {"offload": 1.1, "onload": 1.2}}}, "step_time_ratio": 1.05}
BILL = {"phases": {"sync": {"measured_gib": 3.0, "billed_gib": 4.5}}, "tokens_per_second": 1234.5}


@pytest.mark.parametrize(
    ("part", "figures", "note"),
    [
        ("device", DEVICE, "pull, TP 1, float32 to bfloat16: 1.23 of a plain copy"),
        ("sleep", SLEEP, "over plain copies: optimizer offload 1.10, optimizer onload 1.20; steps, moving over "
                         "staying: 1.05"),
        ("bill", BILL, "GiB measured of those billed: sync 3.00 of 4.50; 1234 tokens/s"),
    ],
)  # fmt: skip
def test_figures_in_words(part: str, figures: dict[str, Any], note: str) -> None:
    assert bench_gpu.PARTS[part].note(figures) == note


@pytest.mark.parametrize(
    ("program", "status", "note"),
    [
        (f"print('table')\nprint({json.dumps(json.dumps(BILL))})", "pass", "1234 tokens/s"),
        ("print('no json')", "fail", "not the JSON object expected"),
        ("print('{}')", "fail", "KeyError"),
        ("raise SystemExit(3)", "fail", "exit status 3"),
        ("import time; time.sleep(60)", "fail", "not ended within 2 s"),
    ],
    ids=["good", "no-json", "other-json", "failure", "hang"],
)
def test_a_part_is_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: str, note: str
) -> None:
    (tmp_path / "part_of_a_test.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = bench_gpu.Part("a part", ("part_of_a_test",), bench_gpu.bill_note)
    row = bench_gpu.measure("it", part, 2 if "sleep" in program else 60)
    assert row.status == status and note in row.note and bool(row.figures) == (status == "pass")


@pytest.mark.parametrize("module", [command for part in bench_gpu.PARTS.values() for command in part.command])
def test_every_part_is_there(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "needs a CUDA GPU"),
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--share", "1"], "--share 1: must be between 0 and 1"),
    ],
    ids=["no-gpu", "steps", "share"],
)
def test_refusals(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_bill.parse(arguments)
    assert problem in capsys.readouterr().err


def test_the_bill_is_of_the_job_that_runs(tmp_path: Path) -> None:
    """Twice the rollout's weights on a CPU, 0.5 GiB of cache: the same numbers as the keys say."""
    model = bench_bill.make_model("tiny", tmp_path / "model")
    given = bench_bill.parse(["--shape", "tiny", "--tokens", "8"])
    bill = bench_bill.predicted(bench_bill.overrides(given, model, tmp_path), model)
    assert set(bench_bill.PHASES) <= set(bill)
    assert bill["rollout"] > 0.5 * GIB and bill["optimizer"] < bill["rollout"]


def test_measured_figures() -> None:
    """Peaks are the largest of all steps, times the medians of those after the first."""

    def record(step: int, peak: float, seconds: float) -> dict[str, float]:
        names = {f"memory/{name}/peak_gib": peak for name in bench_bill.PHASES}
        times = {f"time/{name}": seconds for name in (*bench_bill.PHASES, "step")}
        return {
            "step": step,
            "perf/tokens_per_second": 100 / seconds,
            bench_bill.MISMATCH: 0.01 * step,
            **names,
            **times,
        }

    found = bench_bill.measured([{"step": 0}, record(1, 9.0, 50.0), record(2, 7.0, 2.0), record(3, 8.0, 4.0)])
    assert found["peaks_gib"]["sync"] == 9.0 and found["seconds"]["step"] == 3.0
    assert (found["tokens_per_second"], found["logp_difference"]) == (37.5, 0.03)
    bill = dict.fromkeys(bench_bill.PHASES, 18 * GIB)
    assert bench_bill.beside(found["peaks_gib"], bill)["rollout"] == {
        "measured_gib": 9.0, "billed_gib": 18.0, "billed_over_measured": 2.0,
    }  # fmt: skip
