"""Metrics and phase times: what is written, and that the numbers add up."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import threading
from pathlib import Path

import pytest
from rich.console import Console

from hybridengine.config import LoggingConfig
from hybridengine.distributed import errors
from hybridengine.distributed.world import World
from hybridengine.report.metrics import MetricLogger, step_line
from hybridengine.tracing import PhaseTimer, write_chrome_trace
from hybridengine.types import Prompt, Trajectory

FILES_ONLY = LoggingConfig(console=False, tensorboard=False)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def logged(directory: Path, config: LoggingConfig = FILES_ONLY, *, terminal: bool = False) -> str:
    """The console output of a run of two steps with a validation before and after."""
    out = io.StringIO()
    # Narrow on purpose: a line must not be wrapped where there is no terminal to fit.
    console = Console(file=out, force_terminal=terminal, width=40, highlight=False)
    logger = MetricLogger(config, directory, World(), 2, console=console)
    logger.resume(0)
    logger.validation(0, {"validation/accuracy": 0.25, "validation/samples": 8})
    logger.log(1, {"reward": 0.5, "time/step": 2.0, "time/rollout": 1.5, "sampling/logp_difference/max": 4.8e-7})
    logger.validation(2, {"validation/accuracy": 0.75})
    logger.log(2, {"reward": 0.6, "validation/accuracy": 0.75})
    logger.close()
    logger.close()
    return out.getvalue()


# -- files -----------------------------------------------------------------------------------------


def test_one_record_per_step(tmp_path: Path) -> None:
    logged(tmp_path)
    assert [r["step"] for r in records(tmp_path)] == [0, 1, 2]
    assert records(tmp_path)[0]["validation/accuracy"] == 0.25
    assert records(tmp_path)[2] == {"step": 2, "reward": 0.6, "validation/accuracy": 0.75}


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    logger = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    logger.log(1, {})
    with pytest.raises(ValueError, match="step 1 was logged already"):
        logger.log(1, {})


def test_only_rank_0_writes(tmp_path: Path) -> None:
    logger = MetricLogger(LoggingConfig(), tmp_path / "other", World(rank=1, size=2), 2)
    logger.resume(0)
    logger.validation(0, {"validation/accuracy": 1.0})
    logger.log(1, {"reward": 1.0})
    logger.close()
    assert not (tmp_path / "other").exists()
    assert logger.history == []


def test_resume_removes_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    """Killed after step 5 while writing step 6, resumed from the checkpoint of step 3."""
    first = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    first.resume(0)
    first.validation(0, {"validation/accuracy": 0.1})
    for step in range(1, 6):
        first.log(step, {"reward": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')

    second = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    second.resume(3)
    second.log(4, {"reward": 44.0})
    second.close()
    assert [r["step"] for r in records(tmp_path)] == [0, 1, 2, 3, 4]
    assert records(tmp_path)[4]["reward"] == 44.0
    assert [r["step"] for r in second.history] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("logged", "reward"), [(2, 30.0), (3, 3.0)], ids=["killed-before-the-log", "killed-after"])
def test_a_step_that_was_saved_and_not_logged_has_a_record_after_a_resume(
    tmp_path: Path, logged: int, reward: float
) -> None:
    first = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    first.resume(0)
    for step in range(1, logged + 1):
        first.log(step, {"reward": float(step)})
    first.close()
    second = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    second.resume(3, unlogged={"reward": 30.0})
    second.log(4, {"reward": 4.0})
    second.close()
    assert [(r["step"], r["reward"]) for r in records(tmp_path)] == [(1, 1.0), (2, 2.0), (3, reward), (4, 4.0)]


def test_a_resume_from_another_run_s_checkpoint_brings_no_record_along(tmp_path: Path) -> None:
    logger = MetricLogger(FILES_ONLY, tmp_path, World(), 9)
    logger.resume(3, unlogged={"reward": 30.0})
    logger.log(4, {"reward": 4.0})
    logger.close()
    assert [r["step"] for r in records(tmp_path)] == [4]


def test_a_fresh_start_replaces_the_old_file(tmp_path: Path) -> None:
    logged(tmp_path)
    logged(tmp_path)
    assert [r["step"] for r in records(tmp_path)] == [0, 1, 2]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        MetricLogger(FILES_ONLY, tmp_path, World(), 9).resume(2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_jsonl_is_strict_json(tmp_path: Path, value: float) -> None:
    logger = MetricLogger(FILES_ONLY, tmp_path, World(), 2)
    logger.log(1, {"grad_norm": value})
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "grad_norm": null}\n'
    again = MetricLogger(FILES_ONLY, tmp_path, World(), 2)
    again.resume(1)
    again.close()
    assert records(tmp_path) == [{"step": 1, "grad_norm": None}]


def test_tensorboard_has_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(tmp_path, dataclasses.replace(FILES_ONLY, tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.6)]
    assert [e.step for e in events.Scalars("validation/accuracy")] == [0, 2]


def test_wandb_missing_is_refused_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridengine.report.metrics.importlib.util.find_spec", lambda name: None)
    for rank in (0, 1):
        with pytest.raises(ValueError, match="logging.wandb_project='p' needs the wandb package"):
            MetricLogger(LoggingConfig(wandb_project="p"), tmp_path, World(rank=rank, size=2), 2)


# -- console ---------------------------------------------------------------------------------------


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    text = logged(tmp_path, LoggingConfig(tensorboard=False))
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines() == [
        "validation at step 0: accuracy 0.250 over 8 responses",
        "step 1/2  reward 0.500  2.00s (rollout 1.50)  mismatch 4.8e-07",
        "validation at step 2: accuracy 0.750",
        "step 2/2  reward 0.600  accuracy 0.750",
    ]


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    assert "\x1b" in logged(tmp_path, LoggingConfig(tensorboard=False), terminal=True)


def test_console_off_is_silent(tmp_path: Path) -> None:
    assert logged(tmp_path, FILES_ONLY, terminal=True) == ""


def test_samples_are_printed_literally(tmp_path: Path) -> None:
    """Brackets in a response are text, not markup."""
    out = io.StringIO()
    logger = MetricLogger(
        LoggingConfig(tensorboard=False, samples=1),
        tmp_path,
        World(),
        2,
        console=Console(file=out, highlight=False),
        decode=lambda tokens: f"[red]\\boxed{{{tokens[0]}}}[/red]",
    )
    one = Trajectory(
        prompt=Prompt(index=0, token_ids=[1], text="3+4=", answer="7"),
        sample_index=0,
        token_ids=[7],
        logprobs=[0.0],
        versions=[0],
        truncated=False,
        reward=1.0,
    )
    logger.validation(0, {"validation/accuracy": 1.0}, [one, one])
    assert out.getvalue().count("[red]\\boxed{7}[/red]") == 1
    assert "3+4=" in out.getvalue() and "(answer 7, reward 1)" in out.getvalue()


def test_step_line_adds_nested_phases_and_drops_short_ones() -> None:
    record = {"time/step": 10.0, "time/validation": 1.0, "time/validation/rollout": 4.0, "time/data": 0.01}
    assert step_line(1, 100, record).plain == "step   1/100  10.00s (validation 5.00)"


def test_step_line_has_length_loss_kl_and_rate() -> None:
    record = {"reward": 0.5, "completions/mean_length": 311.25, "loss": -0.01234, "kl": 0.002, "lr": 1e-6}
    assert step_line(7, 9, record).plain == "step 7/9  reward 0.500  length 311.2  loss -0.0123  kl 0.0020  lr 1.0e-06"


# -- phases ----------------------------------------------------------------------------------------


def test_phases_are_exclusive_and_add_up() -> None:
    """Step of 10 s: rollout 4 (of which sync 1 inside), train 5, nothing 1."""
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    timer.start_step(1)
    with timer.phase("rollout"):
        clock.time += 3
        with timer.phase("sync"):
            clock.time += 1
    clock.time += 1
    for seconds in (2, 3):
        with timer.phase("train"):
            clock.time += seconds
    metrics = timer.end_step(tokens=50)
    assert metrics == {
        "time/rollout/sync": 1.0,
        "time/rollout": 3.0,
        "time/train": 5.0,
        "time/step": 10.0,
        "perf/unaccounted": pytest.approx(0.1),
        "perf/tokens": 50.0,
        "perf/tokens_per_second": 5.0,
    }
    assert timer.total("rollout") == 4.0


def test_validation_is_not_throughput() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    timer.start_step(1)
    with timer.phase("rollout"):
        clock.time += 2
    with timer.phase("validation"), timer.phase("rollout"):
        clock.time += 8
    metrics = timer.end_step(tokens=10)
    assert metrics["perf/tokens_per_second"] == 5.0
    assert (metrics["time/rollout"], metrics["time/validation/rollout"]) == (2.0, 8.0)
    assert metrics["perf/unaccounted"] == 0.0


def test_time_between_steps_is_not_lost() -> None:
    """Engine start 9 s; step 1 of 2 s; then 1 s of logging and 3 s of checkpoint belong to step 2, of 6 s."""
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("engine_start"):
        clock.time += 9
    timer.start_step(1)
    with timer.phase("train"):
        clock.time += 2
    assert timer.end_step()["time/step"] == 2.0
    clock.time += 1
    with timer.phase("checkpoint"):
        clock.time += 3
    timer.start_step(2)
    with timer.phase("train"):
        clock.time += 2
    metrics = timer.end_step(tokens=6)
    assert metrics["time/step"] == 6.0 and metrics["time/checkpoint"] == 3.0
    assert metrics["perf/unaccounted"] == pytest.approx(1 / 6)
    assert metrics["perf/tokens_per_second"] == 2.0


def test_other_threads_do_not_count_into_the_step() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def score() -> None:
        with timer.phase("score"):
            clock.time += 1

    timer.start_step(1)
    with timer.phase("rollout"):
        thread = threading.Thread(target=score, name="scorer")
        thread.start()
        thread.join()
    assert set(timer.end_step()) == {"time/rollout", "time/step", "perf/unaccounted"}
    assert [(span.name, span.thread) for span in timer.spans] == [("score", "scorer"), ("rollout", "main")]


def test_a_timeout_names_the_phase_and_the_timer_survives() -> None:
    timer = PhaseTimer()
    timer.start_step(1)
    with pytest.raises(TimeoutError, match="phase 'train/optimizer'"):
        with timer.phase("train"), timer.phase("optimizer"):
            assert errors.current_phase() == "train/optimizer"
            raise RuntimeError("Timed out waiting 600000ms for recv operation to complete")
    assert errors.current_phase() == "start"
    with timer.phase("train"):
        pass
    assert "time/train" in timer.end_step()


@pytest.mark.parametrize("name", ["", "a/b"], ids=["empty", "slash"])
def test_bad_phase_names(name: str) -> None:
    with pytest.raises(ValueError, match="phase name"):
        with PhaseTimer().phase(name):
            pass


def test_steps_do_not_nest() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="end_step without start_step"):
        timer.end_step()
    timer.start_step(1)
    with pytest.raises(ValueError, match="step 2 starts while step 1"):
        timer.start_step(2)


def test_chrome_trace(tmp_path: Path) -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("engine_start"):
        clock.time += 2
    timer.start_step(1)
    with timer.phase("rollout"):
        clock.time += 1
        with timer.phase("sync"):
            clock.time += 0.5
    timer.end_step()
    path = tmp_path / "new" / "trace.json"
    write_chrome_trace(path, timer.spans, rank=3)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["step"], e["pid"]) for e in events] == [
        ("engine_start", 0, 2e6, None, 3),
        ("rollout", 2e6, 1.5e6, 1, 3),
        ("sync", 3e6, 0.5e6, 1, 3),
    ]


def test_the_configuration_lies_beside_the_metrics(tmp_path: Path) -> None:
    logger = MetricLogger(LoggingConfig(tensorboard=False), tmp_path, World(), 3, run_config={"steps": 3})
    logger.resume(0)
    logger.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 3}
