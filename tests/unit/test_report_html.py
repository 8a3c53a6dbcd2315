"""report.html: what it has, that it needs nothing else, and that a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybridengine.memory.tracker import GIB, PhaseMemory
from hybridengine.memory.waterfall import as_rows
from hybridengine.report.html import RunReport, find_warnings, main, read_run, render, write_report
from hybridengine.report.plot import COLORS, distinct_colors
from hybridengine.report.samples import Sample
from hybridengine.tracing import PhaseTimer, Span, write_chrome_trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

HISTORY: list[dict[str, float]] = [{"step": 0, "validation/accuracy": 0.25, "validation/samples": 64}] + [
    {
        "step": step,
        "reward": 0.2 + step / 20,
        "loss": 1 / step,
        "lr": 1e-6,
        "completions/mean_length": 100.0 + step,
        "time/step": 2.0,
        "time/rollout": 1.0,
        "time/forward_backward": 0.9,
        "sampling/logp_difference/max": 1e-6,
        "sampling/logp_difference/mean": 1e-7,
    }
    for step in range(1, 13)
]
HISTORY[-1] |= {"validation/accuracy": 0.8, "validation/samples": 64}
SAMPLES = [
    Sample(step=12, right=True, prompt="2+2=", response="<b>4</b> \\boxed{4}", answer="4", reward=1.0),
    Sample(step=12, right=False, prompt="<script>alert(1)</script>", response="5", answer="4", reward=0.0),
]
MEMORY = [PhaseMemory(name="rollout", used=2 * GIB, peak=3 * GIB, owners={"rollout_weights": GIB, "kv_cache": GIB})]


def spans() -> list[Span]:
    timer = PhaseTimer(clock=iter(range(1000)).__next__)
    for step in range(1, 6):
        timer.start_step(step)
        with timer.phase("rollout"), timer.phase("sync"):
            pass
        with timer.phase("forward_backward"):
            pass
        timer.end_step()
    return timer.spans


def report(**changes: object) -> RunReport:
    values: dict[str, object] = {
        "name": "sums", "history": HISTORY, "spans": spans(), "memory": MEMORY, "samples": SAMPLES,
        "config": {"name": "sums", "seed": 1, "train": {"lr": 0.5}, "reward": {"fn": "math"}},
        "summary": {"total_steps": 12, "world_size": 8, "device": "GPU", "versions": {"torch": "2.13.0"}},
        "warnings": ["memory: 97 % full in phase rollout"], "log": "transfer: pull <x>",
    }  # fmt: skip
    return RunReport(**(values | changes))  # type: ignore[arg-type]


def test_the_page_has_everything_and_needs_nothing_else() -> None:
    page = render(report())
    for text in (
        "<title>sums: hybridengine</title>",
        "12 of 12",
        "0.250 → 0.800",
        "97 % full",
        "&lt;b&gt;4&lt;/b&gt;",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "train.lr",
        "transfer: pull &lt;x&gt;",
        "torch 2.13.0",
    ):
        assert text in page, text
    assert (
        page.count("data:image/svg+xml;base64,") == 8
    )  # learning, loss, length, lr, mismatch, seconds, timeline, memory
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and "<script" not in page and "@import" not in page


def test_changed_keys_stand_beside_their_defaults() -> None:
    page = render(report())
    changed = page[page.index("changed key") : page.index("<details>")]
    assert re.search(r"<code>train\.lr</code></td><td><code>0\.5</code></td><td><code>1e-06</code>", changed)
    assert "reward.fn" in changed and "<code>seed</code>" not in changed


@pytest.mark.parametrize(
    "changes",
    [
        {
            "history": [],
            "spans": [],
            "memory": [],
            "samples": [],
            "summary": {},
            "config": {},
            "log": "",
            "warnings": [],
        },
        {"history": HISTORY[:1], "spans": []},
        {"history": [{"step": 1, "reward": math.nan, "loss": math.nan}]},
    ],
    ids=["nothing", "before-the-first-step", "nan"],
)
def test_runs_that_ended_early(changes: dict[str, object]) -> None:
    page = render(report(error="RuntimeError: <gone>", **changes))
    assert 'id="error">RuntimeError: &lt;gone&gt;' in page


WARNINGS = {
    "flat": ([{"step": i, "reward": 0.0} for i in (1, 2, 3)], "the reward was 0 in every step"),
    "equal-groups": ([{"step": 1, "reward": 0.5, "frac_reward_zero_std": 0.95}], "95% of the last groups"),
    "cut": ([{"step": 1, "completions/clipped_ratio": 0.5}], "50% of the last responses were cut"),
    "mismatch": ([{"step": 1, "sampling/logp_difference/max": 4.0}], "differed by up to 4 in a log-probability"),
    "nan": ([{"step": 2, "grad_norm": math.nan}], "not a finite number: grad_norm in step 2"),
}


@pytest.mark.parametrize(("history", "text"), WARNINGS.values(), ids=WARNINGS.keys())
def test_warnings_from_the_numbers(history: list[dict[str, float]], text: str) -> None:
    (found,) = find_warnings(history)
    assert text in found


def test_a_good_run_has_no_warnings() -> None:
    assert find_warnings(HISTORY) == []


def test_the_report_again_from_what_a_run_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same phases, memory and samples as those that were in memory."""
    (tmp_path / "config.json").write_text(json.dumps(report().config))
    lines = [json.dumps(record) for record in HISTORY] + ['{"step": 13, "rew']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    (tmp_path / "samples.jsonl").write_text(json.dumps(dataclasses.asdict(SAMPLES[0])) + "\n")
    (tmp_path / "run.log").write_text("--- x\nwarning: low on memory\nwarning: low on memory\n")
    found = read_run(tmp_path)
    assert found.error is not None and len(found.history) == 13 and found.warnings == ["low on memory"]

    write_chrome_trace(tmp_path / "trace.json", spans())
    (tmp_path / "summary.json").write_text(json.dumps({"total_steps": 12, "memory": as_rows(MEMORY)}))
    found = read_run(tmp_path)
    assert found.error is None and found.samples == SAMPLES[:1] and list(found.memory) == MEMORY
    assert sorted(found.spans, key=lambda s: (s.start, -s.end)) == sorted(spans(), key=lambda s: (s.start, -s.end))
    assert main([str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file()
    assert main([str(tmp_path / "nowhere")]) == 2 and "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, len(COLORS), 60])
def test_every_phase_has_a_colour_of_its_own(count: int) -> None:
    assert len(set(distinct_colors(count))) == count


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium to look at the page: apt-get install chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """The screenshot has the pictures' colours where they are drawn, and the error's when there is one."""
    from PIL import Image

    shares = {}
    for name, error in (("good", None), ("failed", "RuntimeError: gone\n" * 12)):
        write_report(tmp_path / f"{name}.html", report(error=error))
        shot = tmp_path / f"{name}.png"
        command = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,2600", f"--screenshot={shot}",
            f"file://{tmp_path / name}.html",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with Image.open(shot) as image:
            pixels = image.convert("RGB")
            assert pixels.size == (1100, 2600)
            counts = {color: count for count, color in pixels.getcolors(maxcolors=1 << 24) or []}
        shares[name] = counts
    rollout, forward, accuracy, failure = (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xD5, 0x5E, 0x00), (0xFD, 0xEC, 0xEA)
    for color in (rollout, forward, accuracy):
        assert shares["good"].get(color, 0) > 300, color
    assert shares["failed"].get(failure, 0) > 50_000 and failure not in shares["good"]
