"""What the processes of one arm take of the machine, looked at from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

INTERVAL_SECONDS = 2.0


class MemoryWatch:
    """Peaks of a process's descendants: proportional set size of all together, and memory in use on each GPU.

    GPU memory is the device's, whoever uses it; a process of another job counts as well.

    Attributes:
        host: bytes.
        device: bytes on the fullest GPU; 0 where there is no nvidia-smi.
    """

    def __init__(self, pid: int) -> None:
        self.host = self.device = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL_SECONDS):
            self.host = max(self.host, sum(pss(pid) for pid in descendants(self._pid)))
            self.device = max(self.device, *gpu_bytes(), 0)


def descendants(pid: int) -> list[int]:
    """Process ids, the process itself left out."""
    found = [pid]
    for parent in found:
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found[1:]


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def gpu_bytes() -> list[int]:
    """Memory in use on each GPU, by nvidia-smi; none where it is missing or says nothing."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_mib(text)


def parse_mib(text: str) -> list[int]:
    """
    >>> parse_mib("1024\\n0\\n")
    [1073741824, 0]
    """
    return [int(line) * 2**20 for line in text.splitlines() if line.strip().isdigit()]


def wait_quiet(load: float, *, seconds: float) -> float:
    """Wait until the load average is below ``load``, ``seconds`` at most; what it is then."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > load and time.monotonic() < end:
        time.sleep(5)
    return os.getloadavg()[0]
