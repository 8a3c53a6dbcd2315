"""Signals: one request however often it is sent, and a rank that loses its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridengine import interrupt
from hybridengine.process_control import ancestors, is_python

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from hybridengine import interrupt
interrupt.REPEAT_SECONDS = 1.0
made = interrupt.Interrupt()
interrupt.die_with_launcher()
print("ready", flush=True)
while made.received is None:
    time.sleep(0.01)
print("stopping", flush=True)
time.sleep(float(sys.argv[1]))
print("saved", flush=True)
"""


@pytest.mark.parametrize("kinds", [(signal.SIGTERM,) * 3, (signal.SIGINT, signal.SIGTERM)], ids=["repeated", "both"])
def test_repeated_signals_are_one_request(kinds: tuple[int, ...]) -> None:
    """A scheduler signals launcher and ranks, and the launcher its ranks."""
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, "0.5"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for kind in kinds:
        child.send_signal(kind)
        time.sleep(0.05)
    assert child.stdout.read() == "stopping\nsaved\n" and child.wait() == 0


def test_a_later_signal_acts_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, "60"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "stopping\n"
    time.sleep(1.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("launched", [True, False], ids=["by-torchrun", "by-a-shell"])
def test_a_rank_whose_launcher_is_killed_stops_and_saves(tmp_path: Path, launched: bool) -> None:
    """Started from a shell, it outlives that."""
    log = tmp_path / "log"
    run = f"subprocess.run([sys.executable, '-c', {PROGRAM!r}, '0.1'], stdout=open({str(log)!r}, 'w'))"
    start = f"import subprocess, sys; {run}"
    environment = os.environ | ({"TORCHELASTIC_RUN_ID": "1"} if launched else {})
    launcher = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, env=environment)
    rank = 0
    try:
        wait_for(log, "ready\n")
        rank = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
        launcher.kill()
        launcher.wait()
        if launched:
            wait_for(log, "ready\nstopping\nsaved\n")
        else:
            time.sleep(0.5)
            assert log.read_text() == "ready\n"
    finally:
        if rank and not launched:
            os.kill(rank, signal.SIGKILL)


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + 20
    while not log.exists() or log.read_text() != text:
        assert time.monotonic() < end, log.read_text() if log.exists() else "nothing"
        time.sleep(0.02)


def test_a_rank_whose_launcher_ended_before_it_asked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells only of a parent that ends after the request; the adopter of orphans is no interpreter."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(interrupt, "signal_when_parent_ends", lambda number: None)
    monkeypatch.setattr(interrupt, "ancestors", lambda pid: [7, 8])
    monkeypatch.setattr(interrupt, "is_python", lambda pid: pid == 8)
    interrupt.die_with_launcher()  # a shell stands between
    monkeypatch.setattr(interrupt, "is_python", lambda pid: False)
    with pytest.raises(SystemExit, match="torchrun has ended"):
        interrupt.die_with_launcher()


def test_is_python() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert is_python(os.getpid()) and not is_python(other.pid)
            assert is_python(2**22 + 1), "not to be known"
            assert ancestors(other.pid)[:2] == [os.getpid(), os.getppid()] and ancestors(2**22 + 1) == []
        finally:
            other.kill()
