"""The hang report: asked by signal or by a phase that takes too long; who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridengine.distributed import errors, hang
from hybridengine.distributed.hang import HangWatch, Position, position, table
from tests import ROOT

#: Two ranks: the second is stopped in a computation while the first waits for it in a collective, in C.
PROGRAM = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from hybridengine.distributed import errors, hang
rank = int(sys.argv[1])
hang.POLL_SECONDS, hang.ANSWER_SECONDS, hang.LEAST_SECONDS = 0.05, 3.0, 1.0
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
watch = hang.HangWatch(Path(sys.argv[2]) / "hang", rank, 2, limit_seconds=float(sys.argv[3]),
                       report=lambda text: print(text, flush=True))
watch.start()
with errors.phase("rollout"):
    dist.barrier()
print("ready", flush=True)
with errors.phase("forward_backward"):
    if rank == 1:
        time.sleep(12)
    dist.all_reduce(torch.ones(1))
watch.close()
"""


def start(tmp_path: Path, limit: float) -> list[subprocess.Popen[str]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), str(limit)], stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    return ranks


@pytest.mark.parametrize("cause", ["overdue", "asked", "stopped"])
def test_one_rank_waits_for_the_other(tmp_path: Path, cause: str) -> None:
    ranks = start(tmp_path, limit=4.0 if cause == "overdue" else 600.0)
    try:
        if cause == "stopped":
            ranks[1].send_signal(signal.SIGSTOP)
        if cause != "overdue":
            time.sleep(0.3)
            ranks[0].send_signal(signal.SIGUSR1)
        assert ranks[0].stdout is not None
        lines = [ranks[0].stdout.readline().strip() for _ in range(4)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "where every rank stands" in lines[0] and f"{tmp_path}/hang/rank_*.txt" in lines[0]
    assert lines[1].startswith("rank 0  forward_backward for ") and "waits in all_reduce" in lines[1]
    if cause == "stopped":
        assert lines[2] == "rank 1  no answer: stopped, or gone"
    else:
        assert lines[2].startswith("rank 1  forward_backward for ") and "is at outside of this package" in lines[2]
        assert "sleep" not in lines[2] and "<string>" in (tmp_path / "hang/rank_1.txt").read_text()
    assert lines[3] == "rank(s) 0 wait for rank(s) 1"
    assert "all_reduce" in (tmp_path / "hang/rank_0.txt").read_text()


def test_a_phase_is_allowed_five_times_its_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HangWatch(tmp_path, 0, 1, limit_seconds=600, report=print)
    monkeypatch.setattr(errors, "_longest", {"rollout": 20.0, "sync": 0.1, "validation": 500.0})
    assert [watch.allowed(name) for name in ("rollout", "sync", "validation", "new")] == [100.0, 30.0, 300.0, 300.0]


def test_phases_of_the_main_thread_are_known_to_others() -> None:
    with errors.phase("outer"):
        outer = errors.main_phase()
        with errors.phase("inner"):
            assert errors.main_phase()[0] == "inner"
            time.sleep(0.01)
        assert errors.main_phase() == outer and outer[0] == "outer"
        assert position().phase == "outer" and position().waits_in is None
    assert errors.main_phase()[0] == errors.OUTSIDE
    longest = errors.longest_run("inner")
    assert longest is not None and longest >= 0.01


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (("all_reduce", "barrier"), "every rank waits, and not for the same: they have taken different ways"),
        (
            ("all_reduce", "all_reduce"),
            "every rank waits for the same: a slow or broken link, or a rank that was replaced",
        ),
        ((None, "barrier"), "rank(s) 1 wait for rank(s) 0"),
        ((None, None), None),
    ],
    ids=["different", "same", "one", "none"],
)
def test_who_waits_for_whom(positions: tuple[str | None, ...], told: str | None, tmp_path: Path) -> None:
    found = {rank: Position("optimizer", 3.0, waits_in, "loop.py:1 run") for rank, waits_in in enumerate(positions)}
    lines = table(found, 2, by=0, directory=tmp_path).splitlines()
    assert len(lines) == 3 + (told is not None) and (told is None or lines[-1].strip() == told)


def test_a_run_without_a_report_has_no_folder_and_ends_without_waiting(tmp_path: Path) -> None:
    watch = HangWatch(tmp_path / "hang", 0, 1, limit_seconds=600, report=print)
    watch.close()  # not started: nothing to end
    watch.start()
    time.sleep(0.05)  # in its look for a signal by now
    begin = time.monotonic()
    watch.close()
    watch.close()
    assert time.monotonic() - begin < hang.POLL_SECONDS / 2 and not (tmp_path / "hang").exists()


def test_an_old_request_is_not_answered(tmp_path: Path) -> None:
    (tmp_path / "request").write_text("old 0")
    told: list[str] = []
    watch = HangWatch(tmp_path, 0, 1, limit_seconds=600, report=told.append)
    before = signal.getsignal(signal.SIGUSR1)
    watch.start()
    try:
        time.sleep(0.2)
        assert not told and not (tmp_path / "rank_0.txt").exists()
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        watch.close()
    assert "rank 0" in told[0] and signal.getsignal(signal.SIGUSR1) == before
    assert hang.POLL_SECONDS == 1.0
