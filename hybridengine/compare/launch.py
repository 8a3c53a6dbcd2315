"""Start one arm of a comparison: the whole program under torchrun, in fresh processes, with a limit of time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridengine.compare.arms import Arm
from hybridengine.compare.watch import MemoryWatch
from hybridengine.config.overrides import quoted

RESULT_FILE, LOG_FILE = "result.json", "log.txt"
#: Between a polite request to end and the end.
GRACE_SECONDS = 30
ERROR_LINES = 12

#: Keys that every arm has: no validation, nothing written that a comparison does not read, nobody asked to resume.
QUIET = (
    "validate_every=0", "checkpoint.resume=never", "checkpoint.minutes=0", "checkpoint.every=0", "checkpoint.best=null",
    "checkpoint.at_end=false", "checkpoint.export=false", "logging.console=true", "logging.jsonl=true",
    "logging.tensorboard=false", "logging.wandb_project=null", "logging.samples=0", "logging.completions=0",
    "logging.plot=false", "logging.report=false", "monitor.action=warn",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one arm, ended.

    Attributes:
        status: of torchrun; 0: done.
        error: the end of its log, where it failed.
        seconds: from start to end, engine start included.
        host_gib, device_gib: memory peaks, see MemoryWatch.
        load_average: before it began.
    """

    arm: str
    round: int
    status: int
    error: str
    seconds: float
    host_gib: float
    device_gib: float
    load_average: float

    def write(self, directory: Path) -> None:
        temporary = directory / f"{RESULT_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(temporary, directory / RESULT_FILE)


def read_result(directory: Path) -> Result | None:
    """Of a run that has ended; None where it did not begin or was interrupted."""
    path = directory / RESULT_FILE
    return Result(**json.loads(path.read_text())) if path.is_file() else None


def start(arm: Arm, job: Sequence[str], directory: Path, *, method: str, round: int, timeout: float) -> Result:
    """Run the job as this arm to its end; what an interrupted attempt left in ``directory`` is removed before.

    Args:
        job: the user's arguments for hybridengine.train, with steps as the comparison wants them.
        method: the user's sync.method.
        timeout: seconds; a run that takes longer is ended, and has failed.
    """
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arm.ranks),
        "-m", "hybridengine.train", *job, *QUIET, *arm.overrides(method=method),
        f"output_dir={quoted(str(directory.resolve()))}", f"name={quoted(arm.name)}",
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONWARNINGS": "ignore"}
    load_average, began = os.getloadavg()[0], time.monotonic()
    with (directory / LOG_FILE).open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        with MemoryWatch(process.pid) as memory:
            late = ""
            try:
                status = process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                late, status = f"no end after {timeout:.0f} s", -1
            finally:
                stop(process)
    error = "" if status == 0 else late or last_words((directory / LOG_FILE).read_text(errors="replace"))
    result = Result(
        arm=arm.name, round=round, status=status, error=error, seconds=time.monotonic() - began,
        host_gib=memory.host / 2**30, device_gib=memory.device / 2**30, load_average=load_average,
    )  # fmt: skip
    result.write(directory)
    return result


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher if it still runs; it ends its workers when asked politely."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_words(log: str) -> str:
    """The message of the rank that failed first, as torchrun shows it; else the log's last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    begun = [number for number, line in enumerate(lines) if line.lstrip().startswith(("hybridengine: ", "Traceback"))]
    chosen = lines[begun[-1] :] if begun else lines
    ruled = [number for number, line in enumerate(chosen) if set(line.strip()) == {"="}]
    chosen = chosen[: ruled[0]] if ruled and ruled[0] else chosen
    return "\n".join(line.strip() for line in chosen[-ERROR_LINES:])
