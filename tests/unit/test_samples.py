"""Which responses are shown and kept: samples, completions and their viewer, run.log."""

from __future__ import annotations

import io
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from hybridengine.config import LoggingConfig
from hybridengine.distributed.world import World
from hybridengine.report.completions import file_of, kept_steps, main, read_completions, write_completions
from hybridengine.report.metrics import MetricLogger
from hybridengine.report.run_log import RunLog
from hybridengine.report.samples import choose_samples, is_right, read_samples
from hybridengine.types import Prompt, Trajectory


def answered(index: int, reward: float, sample: int = 0) -> Trajectory:
    return Trajectory(
        prompt=Prompt(index=index, token_ids=[1], text=f"question {index}", answer=str(index)),
        sample_index=sample,
        token_ids=[index, sample],
        logprobs=[-0.5, -0.5],
        versions=[3, 4],
        truncated=False,
        reward=reward,
        rewards={"right": reward},
    )


HALF_RIGHT = [answered(i, float(i % 2)) for i in range(40)]


def test_one_right_and_one_wrong_that_change_over_time() -> None:
    chosen = [choose_samples(HALF_RIGHT, 2, step=step) for step in range(10)]
    assert all([is_right(t) for t in pair] == [True, False] for pair in chosen)
    assert len({pair[0].prompt.index for pair in chosen}) > 4 and len({pair[1].prompt.index for pair in chosen}) > 4
    assert choose_samples(HALF_RIGHT, 2, step=3) == chosen[3]


@pytest.mark.parametrize(
    ("rewards", "count", "expected"),
    [
        ([1, 1, 1], 2, [1, 1]),
        ([0, 0, 0], 2, [0, 0]),
        ([0.1, 0.7, 0.2], 2, [0.7, None]),
        ([1, 0, 0, 0], 4, [1, 0, 0, 0]),
        ([1, 0], 0, []),
        ([], 2, []),
    ],
    ids=["all-right", "all-wrong", "partial-credit", "more-wrong", "none-asked-for", "none-there"],
)
def test_other_mixtures(rewards: list[float], count: int, expected: list[float | None]) -> None:
    found = [t.reward for t in choose_samples([answered(i, r) for i, r in enumerate(rewards)], count, step=1)]
    assert len(found) == len(expected)
    assert all(want is None or got == want for got, want in zip(found, expected, strict=True))


def logger(directory: Path, *, validates: bool, out: io.StringIO | None = None, **config: object) -> MetricLogger:
    settings = LoggingConfig(tensorboard=False, **config)  # type: ignore[arg-type]
    console = Console(file=out or io.StringIO(), highlight=False, width=200)
    run_config = {"validate_every": 5 if validates else 0}
    return MetricLogger(
        settings, directory, World(), 20, console=console, run_config=run_config, decode=lambda tokens: f"text {tokens}"
    )


def test_samples_are_printed_with_a_mark_kept_and_truncated_on_resumption(tmp_path: Path) -> None:
    out = io.StringIO()
    first = logger(tmp_path, validates=True, out=out)
    first.validation(0, {"validation/accuracy": 0.5}, HALF_RIGHT)
    first.log(5, {})
    first.validation(5, {}, HALF_RIGHT)
    first.close()
    assert out.getvalue().count("✓ prompt") == out.getvalue().count("✗ prompt") == 2
    assert [sample.step for sample in read_samples(tmp_path / "samples.jsonl")] == [0, 0, 5, 5]
    second = logger(tmp_path, validates=True)
    second.resume(4)
    assert [sample.step for sample in second.samples] == [0, 0]
    second.close()
    assert [sample.right for sample in read_samples(tmp_path / "samples.jsonl")] == [True, False]


def test_training_samples_are_shown_where_nothing_is_validated(tmp_path: Path) -> None:
    for validates, expected in ((False, [1, 1, 2, 2, 4, 4]), (True, [])):
        run = logger(tmp_path / str(validates), validates=validates)
        run.resume(0)
        for step in range(1, 5):
            run.rollout(step, HALF_RIGHT)
        assert [sample.step for sample in run.samples] == expected
        run.close()


def test_completions_are_kept_by_option(tmp_path: Path) -> None:
    run = logger(tmp_path, validates=True, completions=2)
    run.validation(0, {}, HALF_RIGHT[:4])
    for step in range(1, 6):
        run.rollout(step, HALF_RIGHT)
    run.close()
    assert kept_steps(tmp_path) == [2, 4] and kept_steps(tmp_path, validation=True) == [0]
    row = next(read_completions(file_of(tmp_path, 4)))
    assert row == {
        "step": 4, "prompt_index": 0, "sample": 0, "prompt": "question 0", "response": "text [0, 0]", "answer": "0",
        "reward": 0.0, "rewards": {"right": 0.0}, "tokens": 2, "truncated": False, "versions": [3, 4],
    }  # fmt: skip
    other = logger(tmp_path / "none", validates=True)
    other.rollout(2, HALF_RIGHT)
    assert not (tmp_path / "none" / "completions").exists()


@pytest.mark.parametrize(
    ("options", "texts", "absent"),
    [
        ([], ["step 7: 4 of 4 responses match", "question 3"], []),
        (["--max-reward", "0.3"], ["2 of 4 responses match", "question 0"], ["question 3"]),
        (["--min-reward", "0.8", "--prompt", "3"], ["1 of 4", "reward 0.9"], ["question 2"]),
        (["--grep", r"answer \d*2"], ["1 of 4", "answer 2"], ["question 1"]),
        (["--limit", "2"], ["4 of 4 responses match, 2 shown", "question 3", "question 0"], ["question 1"]),
        (["--step", "6"], ["step 6: 1 of 1"], []),
    ],
    ids=["all", "low", "of-a-prompt", "grep", "best-and-worst", "step"],
)
def test_viewer(
    tmp_path: Path, options: list[str], texts: list[str], absent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = [0.1, 0.3, 0.5, 0.9]

    def text_of(tokens: list[int]) -> str:
        return f"answer {tokens[0]}"

    write_completions(file_of(tmp_path, 6), [answered(0, 0.0)], text_of, step=6)
    write_completions(file_of(tmp_path, 7), [answered(i, r) for i, r in enumerate(rewards)], text_of, step=7)
    assert main([str(tmp_path), *options]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in texts) and not any(text in shown for text in absent), shown


def test_viewer_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2 and "train with logging.completions=1" in capsys.readouterr().err
    for step in (1, 2, 3, 10):
        write_completions(file_of(tmp_path, step), [], str, step=step)
    assert main([str(tmp_path), "--step", "5"]) == 2 and "there are 1-3, 10" in capsys.readouterr().err


def test_details_go_to_the_log_and_to_the_console_by_option(tmp_path: Path) -> None:
    for verbose in (False, True):
        out = io.StringIO()
        run = logger(tmp_path / str(verbose), validates=True, out=out, verbose=verbose)
        run.message("what everybody wants to know")
        run.detail("reshard plan: 26 parameters")
        run.close()
        assert "everybody" in out.getvalue() and ("reshard" in out.getvalue()) == verbose
        assert "everybody" in (text := (tmp_path / str(verbose) / "run.log").read_text()) and "reshard" in text


def test_warnings_of_the_package_reach_the_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for _ in range(2):
        logging.getLogger("hybridengine.placement.near").warning("memory: %d %% full", 97)
    logging.getLogger("hybridengine").info("nothing")
    log.close()
    logging.getLogger("hybridengine").warning("after the end")
    assert log.warnings == ["memory: 97 % full"]
    assert "after the end" not in log.read()


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file, which has LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB, in them
    fragments with checksum (4 bytes), length (2), and kind (1): whole, first, middle or last."""
    position, whole = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of the wandb package without a network: its name, its curves and the samples table, read back."""
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = MetricLogger(
        LoggingConfig(console=False, tensorboard=False, wandb_project="sums"), tmp_path, World(), 5,
        run_config={"name": "my-run", "validate_every": 5, "train": {"lr": 0.5}}, decode=str,
    )  # fmt: skip
    run.resume(0)
    run.validation(0, {"validation/accuracy": 0.5}, HALF_RIGHT)
    run.log(1, {"reward": 0.25})
    run.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    names, curves = set(), {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            names.add((record.run.display_name, record.run.project))
        for item in record.history.item:
            curves["/".join(item.nested_key) or item.key] = item.value_json
    assert names == {("my-run", "sums")}
    assert json.loads(curves["reward"]) == 0.25 and json.loads(curves["validation/accuracy"]) == 0.5
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"][:3] == ["step", "right", "prompt"]
    assert [row[1] for row in content["data"]] == [True, False]
