"""What goes with a run: evaluation, export, the best checkpoint, reports after failures, one message under torchrun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, SMALL, command, environment, records, run

REFERENCE = ["rollout=transformers", "rollout.tp=1"]
VALIDATED = [
    "reward.fn=exact_match", "validate_every=2", "rollout.validation.n=3", "rollout.validation.temperature=0.8",
    "data.validation_size=24", "rollout.min_p=0.02", "rollout.stop=['7']",
]  # fmt: skip


def program(module: str, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    words = [
        module if word == "hybridengine.train" else word for word in command(list(map(str, arguments)), ranks=ranks)
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment(), cwd=ROOT)


def measured(tmp_path: Path, *arguments: object, ranks: int = 1) -> dict[str, Any]:
    out = tmp_path / "numbers.json"
    done = program("hybridengine.evaluate", *arguments, "--out", out, ranks=ranks)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


def validation_at(directory: Path, step: int) -> dict[str, float]:
    (record,) = [r for r in records(directory) if r["step"] == step]
    return {name: record[f"validation/{name}"] for name in ("accuracy", "reward", "mean_length", "samples")}


def numbers(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in ("accuracy", "reward", "mean_length", "samples")}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("transformers", marks=pytest.mark.slow),  # the rest of the file evaluates with it, too
        pytest.param("vllm", marks=pytest.mark.engine),
    ],
)
def test_an_evaluation_equals_the_run_s_own_validation(small_model: Path, tmp_path: Path, engine: str) -> None:
    """Sampled, not greedy, with a stop string and min-p: at the end, at an earlier checkpoint, over two ranks, and of
    the exported model."""
    directory = tmp_path / "run"
    job = [*SMALL, f"rollout={engine}", "rollout.tp=1", f"model.path={small_model}", f"output_dir={directory}"]
    run([*job, *VALIDATED, "steps=4", "checkpoint.every=2", "checkpoint.keep=0", "checkpoint.best=validation/accuracy"])
    last = measured(tmp_path, directory)
    assert numbers(last) == pytest.approx(validation_at(directory, 4)) and last["step"] == 4
    if engine == "vllm":
        return
    earlier = measured(tmp_path, directory, "--step", 2, ranks=2)
    assert numbers(earlier) == pytest.approx(validation_at(directory, 2))
    best = json.loads((directory / "checkpoints" / "best.json").read_text())
    accuracies = {step: validation_at(directory, step)["accuracy"] for step in (2, 4)}
    assert best["value"] == max(accuracies.values()) == measured(tmp_path, directory, "--best")["accuracy"]

    done = program("hybridengine.export", directory, "--step", 2, "--out", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    keys = [*VALIDATED, *REFERENCE, "data.train=arithmetic", "data.chat=false", "rollout.max_tokens=4"]
    again = measured(tmp_path, tmp_path / "model", *keys, "data.max_prompt_tokens=8", "seed=1")
    assert numbers(again) == pytest.approx(validation_at(directory, 2))


@pytest.mark.parametrize(
    ("ranks", "override", "status", "last"),
    [
        (2, "train.lr=-1", 1, "hybridengine: train.lr=-1.0: must be greater than 0"),
        (1, "train.lr=-1", 2, "hybridengine: train.lr=-1.0: must be greater than 0"),
        (2, "data.train=/nowhere.jsonl", 1, "/nowhere.jsonl: no such file"),
    ],
    ids=["torchrun", "alone", "data"],
)
def test_one_message_last_on_the_screen(
    small_model: Path, tmp_path: Path, ranks: int, override: str, status: int, last: str
) -> None:
    overrides = [*SMALL, *REFERENCE, f"model.path={small_model}", f"output_dir={tmp_path}", override]
    done = program("hybridengine.train", *overrides, ranks=ranks)
    assert done.returncode == status
    lines = [line for line in done.stderr.strip().splitlines() if set(line) - set("=")]
    assert last in lines[-1] and done.stderr.count(last) == 1
    assert ("exitcode  : 2" in done.stderr) == (ranks == 2)


REWARD = """
calls = 0

def score(prompt, response, answer, **kwargs):
    global calls
    calls += 1
    if calls > 150:
        raise RuntimeError("verifier went away")
    return float(response.strip() == str(answer))
"""


def test_a_run_that_fails_leaves_a_report(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    overrides = [*SMALL, *REFERENCE, f"model.path={small_model}", f"output_dir={tmp_path / 'run'}", "steps=50"]
    done = program("hybridengine.train", *overrides, f"reward.fn={tmp_path / 'mine.py'}:score", "logging.report=true")
    assert done.returncode == 1
    assert "verifier went away" in done.stderr.strip().splitlines()[-1] and "in score" in done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert "verifier went away" in page and 'class="error"' in page and page.count("data:image/svg+xml") > 5
    again = program("hybridengine.report.html", tmp_path / "run")
    assert again.returncode == 0 and "it is still going, or it was killed" in (tmp_path / "run/report.html").read_text()


def test_a_repeated_run_changes_nothing(small_model: Path, tmp_path: Path) -> None:
    overrides = [*SMALL, *REFERENCE, f"model.path={small_model}", f"output_dir={tmp_path}", "steps=2"]
    run(overrides)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = program("hybridengine.train", *overrides, ranks=2)
    assert done.returncode == 0 and done.stdout.count("nothing left to do") == 1
    other = program("hybridengine.train", *overrides, "seed=2", ranks=2)
    assert other.returncode != 0 and "seed was 1, now 2" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
