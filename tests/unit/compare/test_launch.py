"""One arm under torchrun: what is started, what a failure says, limits of time; with a stand-in for Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridengine.compare import launch, watch
from hybridengine.compare.arms import Arm
from hybridengine.compare.launch import Result, last_words, read_result, start
from hybridengine.config.compose import build

STAND_IN = """#!{python}
import json, os, sys, time
arguments = sys.argv[1:]
out = [a for a in arguments if a.startswith("output_dir=")][-1].split("=", 1)[1].strip('"')
with open(os.path.join(out, "seen.json"), "w") as file:
    json.dump([arguments, os.environ.get("OMP_NUM_THREADS")], file)
{body}
"""
ARM = Arm.parse("disaggregated-1+1-async", ranks=2)


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, *, timeout: float = 60.0, directory: str = "run"
) -> Result:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, body=body))
    python.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(python))
    job = ["+experiment=quickstart", "steps=8", "output_dir=mine", "checkpoint.at_end=true"]
    return start(ARM, job, tmp_path / directory, method="gather", round=1, timeout=timeout)


def test_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own keys come first, so that the comparison's replace them; nothing of the user's is written to."""
    found = run(tmp_path, monkeypatch, "", directory="a run={1}")
    assert (found.status, found.error, found.arm, found.round) == (0, "", ARM.name, 1)
    arguments, threads = json.loads((tmp_path / "a run={1}" / "seen.json").read_text())
    assert arguments[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert arguments[5:7] == ["-m", "hybridengine.train"] and threads is not None
    config = build(arguments[7:])
    assert config.output_dir == str(tmp_path / "a run={1}") and config.name == ARM.name
    assert (config.steps, config.validate_every, config.checkpoint.at_end) == (8, 0, False)
    assert (config.schedule.name, config.placement.rollout_ranks, config.sync.method) == ("async", 1, "auto")
    assert not (tmp_path / "mine").exists()
    assert read_result(tmp_path / "a run={1}") == found


def test_what_an_interrupted_attempt_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("half a li")
    run(tmp_path, monkeypatch, "")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_failure_says_what_the_program_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "print('working'); sys.stderr.write('hybridengine: data.train=d: no such file\\n'); sys.exit(1)"
    found = run(tmp_path, monkeypatch, body)
    assert (found.status, found.error) == (1, "hybridengine: data.train=d: no such file")


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    found = run(tmp_path, monkeypatch, "time.sleep(60)", timeout=1.0)
    assert found.status != 0 and found.error == "no end after 1 s" and time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("step 1\nTraceback (most recent call last):\n  File x\nRuntimeError: gone\n", "RuntimeError: gone"),
        (
            "hybridengine: first\n====\nRoot Cause\n====\nmessage: hybridengine: second, the cause\n",
            "hybridengine: first",
        ),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
    ids=["traceback", "refusal", "killed", "nothing"],
)
def test_last_words(log: str, words: str) -> None:
    assert words in last_words(log) and len(last_words(log).splitlines()) <= 12


def test_memory_of_a_process_tree() -> None:
    """A child of a child that holds 64 MB."""
    inner = "import time; x = bytearray(b'x') * (64 << 20); print('ready', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        children = watch.descendants(process.pid)
        assert len(children) == 1 and 64 << 20 < watch.pss(children[0]) < 128 << 20
        assert process.pid in watch.descendants(os.getpid())
    finally:
        for pid in watch.descendants(process.pid):
            os.kill(pid, 9)
        process.kill()
        process.wait()
    assert watch.pss(process.pid) == 0


def test_memory_of_gpus_is_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1024\\n80000\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert watch.gpu_bytes() == [1024 << 20, 80000 << 20]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert watch.gpu_bytes() == []
