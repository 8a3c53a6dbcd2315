"""The summary's numbers, its table, the plot, and docs/config.md."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybridengine.config import walk
from hybridengine.distributed.world import World
from hybridengine.report import summary as report
from hybridengine.report.plot import write_plot
from hybridengine.tools import config_docs as config_docs
from hybridengine.tracing import PhaseTimer, Span
from tests import ROOT

#: Step 1 is slow (compilation). Steps 2 and 3: 30 tokens in 1 s and 30 in 2 s, 10 % and 1 % of 1 s and 2 s unaccounted.
HISTORY: list[dict[str, float]] = [
    {"step": 0, "validation/accuracy": 0.25, "validation/samples": 100},
    {"step": 1, "reward": 0.2, "time/step": 50.0, "perf/unaccounted": 0.9, "perf/tokens_per_second": 1.0},
    {
        "step": 2,
        "reward": 0.4,
        "time/step": 1.0,
        "time/rollout": 0.9,
        "perf/unaccounted": 0.1,
        "perf/tokens": 30.0,
        "perf/tokens_per_second": 30.0,
        "sampling/logp_difference/max": 3e-6,
    },
    {
        "step": 3,
        "reward": 0.6,
        "time/step": 2.0,
        "time/rollout": 1.98,
        "perf/unaccounted": 0.01,
        "perf/tokens": 30.0,
        "perf/tokens_per_second": 15.0,
        "sampling/logp_difference/max": 1e-6,
        "validation/accuracy": 0.75,
        "validation/samples": 100,
    },
]


def summary(history: list[dict[str, float]] = HISTORY, **extra: Any) -> dict[str, Any]:
    return report.summarize(
        history, name="run", world=World(size=2), seconds_total=90.0, seconds_engine_start=14.0, extra=extra
    )


def test_summary_has_every_promised_entry() -> None:
    promised = (
        "steps seconds_total seconds_engine_start accuracy_before accuracy_after max_logp_difference "
        "unaccounted_fraction tokens_per_second world_size commit versions"
    )
    assert set(promised.split()) <= set(summary())
    assert {"python", "torch", "vllm", "transformers", "hybridengine"} <= set(summary()["versions"])


def test_summary_numbers_are_of_the_steady_state() -> None:
    """Unaccounted: (0.1·1 + 0.01·2) / 3 = 0.04. Throughput: 60 tokens in 3 s."""
    found = summary(model="there")
    assert (found["steps"], found["world_size"], found["model"]) == (3, 2, "there")
    assert (found["accuracy_before"], found["accuracy_after"]) == (0.25, 0.75)
    assert found["unaccounted_fraction"] == pytest.approx(0.04)
    assert found["tokens_per_second"] == pytest.approx(20.0)
    assert found["max_logp_difference"] == 3e-6
    assert found["seconds_per_step"] == 1.5


def test_a_single_step_is_reported() -> None:
    assert summary(HISTORY[:2])["unaccounted_fraction"] == pytest.approx(0.9)


@pytest.mark.parametrize("history", [[], HISTORY[1:2]], ids=["nothing", "no-validation"])
def test_what_was_not_measured_is_none(history: list[dict[str, float]]) -> None:
    found = summary(history)
    assert found["accuracy_before"] is None and found["accuracy_after"] is None
    assert found["max_logp_difference"] is None
    report.print_summary(found, Console(file=io.StringIO()))


def test_summary_file_is_strict_json(tmp_path: Path) -> None:
    report.write_summary(tmp_path / "new" / "summary.json", summary() | {"max_logp_difference": math.nan})
    text = (tmp_path / "new" / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["max_logp_difference"] is None


def test_table_reads_well() -> None:
    out = io.StringIO()
    report.print_summary(summary(), Console(file=out, width=100), {"model": Path("out/model"), "plot": None})
    text = out.getvalue()
    assert "0.250 → 0.750  (95 %: 0.657–0.825, n = 100)" in text
    assert "20 tokens/s" in text and "4.0 % of step time" in text and "out/model" in text
    assert "plot" not in text


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
    ids=["8of10", "none", "all", "half"],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    """Newcombe (1998), Statistics in Medicine 17:857, method 3, with z = 1.96."""
    assert report.wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (3, 2), (-1, 2)], ids=["n0", "more-than-n", "negative"])
def test_wilson_interval_refuses(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="="):
        report.wilson_interval(successes, n)


def test_commit_is_of_the_packages_own_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lies untracked inside another project's repository reports no commit."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    package = tmp_path / "hybridengine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(report, "__file__", str(package / "report.py"))
    assert report.commit() == {"commit": None, "commit_modified": None}

    subprocess.run([*git, "add", "hybridengine/__init__.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    clean = report.commit()
    assert clean["commit"] is not None and len(clean["commit"]) == 40 and clean["commit_modified"] is False
    (package / "__init__.py").write_text("changed = 1\n")
    assert report.commit() == clean | {"commit_modified": True}


# -- plot ------------------------------------------------------------------------------------------


def spans() -> list[Span]:
    timer = PhaseTimer(clock=iter(range(1000)).__next__)
    for step in (1, 2, 3):
        timer.start_step(step)
        with timer.phase("rollout"), timer.phase("sync"):
            pass
        with timer.phase("forward_backward"):
            pass
        timer.end_step()
    return timer.spans


@pytest.mark.parametrize(
    ("history", "timeline"),
    [(HISTORY, True), (HISTORY[:2], False), ([], False), ([{"step": 1, "reward": math.nan}], True)],
    ids=["run", "one-step", "nothing", "nan"],
)
def test_plot_is_a_picture(tmp_path: Path, history: list[dict[str, float]], timeline: bool) -> None:
    from PIL import Image

    path = tmp_path / "new" / "report.png"
    write_plot(path, history, spans() if timeline else [], title="run")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width >= 1200
        assert image.convert("L").getextrema() == (0, 255)


def test_plot_leaves_pyplot_alone() -> None:
    code = "import sys, hybridengine.report.plot, hybridengine.report.summary; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- docs/config.md --------------------------------------------------------------------------------


def test_config_docs_are_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == config_docs.render(), "run `make docs`"


def test_config_docs_have_every_key_and_no_other() -> None:
    keys = {name for name, _ in walk()}
    text = config_docs.render()
    assert all(f"| `{key}` |" in text for key in keys)
    ours = {key for line in config_docs.EQUIVALENTS for key in line.ours.split(", ")}
    assert ours <= keys


def test_config_docs_tables_have_equal_rows() -> None:
    tables = [block for block in config_docs.render().split("\n\n") if block.startswith("|")]
    for table in tables:
        widths = {line.replace("\\|", "").count("|") for line in table.strip().splitlines()}
        assert len(widths) == 1, table
