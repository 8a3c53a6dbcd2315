"""Small jobs to break: a few numbers of each step, the processes that belong to one, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.process_control import ancestors
from tests import ROOT
from tests.e2e.runs import SMALL, command, environment

NUMBERS = ("loss", "grad_norm", "reward", "completions/mean_length")
#: Seconds in which all of a job has to be gone after a kill: torchrun gives its ranks 30.
GRACE = 45.0
_MARK = "HYBRIDENGINE_TEST_JOB"

_HERE = ["rollout=transformers", "rollout.tp=1"]
_APART = [*_HERE, "placement=disaggregated"]
_LONG = ["rollout.max_tokens=16", "schedule.over_provision=2"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A placement and schedule of two ranks; ``exact``: its curve is the same whenever it is run."""

    name: str
    overrides: tuple[str, ...]
    exact: bool = True


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("sync", tuple(_HERE)),
        Variant("partial", (*_HERE, "schedule=partial", *_LONG), exact=False),  # who is done first is a matter of time
        Variant("vllm", ("rollout.tp=2",)),
        Variant("apart", tuple(_APART)),
        Variant("one_step_off", (*_APART, "schedule=one_step_off"), exact=False),
        Variant("apart_partial", (*_APART, "schedule=partial", *_LONG), exact=False),
        Variant("async", (*_APART, "schedule=async"), exact=False),
    )
}


def overrides(variant: Variant, model: Path, output_dir: Path, steps: int) -> list[str]:
    return [
        *SMALL, *variant.overrides, f"model.path={model}", f"output_dir={output_dir}", f"steps={steps}",
        "checkpoint.every=1", "distributed.timeout_seconds=60",
    ]  # fmt: skip


@dataclass(slots=True)
class Job:
    """A job that runs, with every process that it has started, however many parents ended since."""

    overrides: list[str]
    log: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                command(self.overrides, ranks=2), stdout=file, stderr=file, cwd=ROOT, start_new_session=True,
                env=environment() | {_MARK: self.mark},
            )  # fmt: skip

    def pids(self) -> list[int]:
        """Of all its processes that are no zombies."""
        return [pid for pid in all_pids() if f"{_MARK}={self.mark}".encode() in _read(pid, "environ").split(b"\0")]

    def rank(self, number: int) -> int | None:
        """The process of a rank; None before it is there."""
        for pid in self.pids():
            told = _read(pid, "environ").split(b"\0")
            if f"RANK={number}".encode() in told and b"hybridengine.train" in _read(pid, "cmdline"):
                parents = _read(ancestors(pid)[0], "environ").split(b"\0")
                if f"RANK={number}".encode() not in parents:  # and none of what the rank has started
                    return pid
        return None

    def gone(self, within: float) -> bool:
        """Wait for the end of all its processes."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            self.process.poll()
            if not self.pids():
                return True
            time.sleep(0.1)
        return not self.pids()

    def end(self) -> None:
        """Leave nothing running."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(overrides: list[str], log: Path) -> Iterator[Job]:
    job = Job(overrides, log)
    try:
        yield job
    finally:
        job.end()


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def leftovers() -> set[str]:
    """Names in shared memory and in the temporary directory that a job could have made."""
    return {str(path) for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).glob("*") if _ours(path)}


def _ours(path: Path) -> bool:
    return any(word in path.name for word in ("hybridengine", "psm_", "sem.", "torch_", "gloo", "vllm", "hebox"))


def last_step(output_dir: Path) -> int:
    """The last step of which a whole record is written; -1 without any."""
    return max((record["step"] for record in whole_records(output_dir)), default=-1)


def whole_records(output_dir: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError):
        for line in (output_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def numbers(output_dir: Path) -> dict[int, tuple[float, ...]]:
    """Step -> its numbers."""
    return {r["step"]: tuple(r[name] for name in NUMBERS) for r in whole_records(output_dir) if r["step"] > 0}


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""
