"""Used and peak memory per phase and per owner, cheap enough to be measured in every step.

Peaks are the kernel's and the allocator's own high-water marks, reset at the start of each phase, so none is missed.
Only what PSS and RSS differ by is looked at less often, for at most SHARED_COST of the time:

    host:   peak PSS = PSS now + (high-water RSS - RSS now)      /proc/self/{smaps_rollup, status, clear_refs}
    device: peak     = used now + (torch's reserved peak - torch's reserved now)     cudaMemGetInfo, torch.cuda

The differences cancel what the two sides do not share: memory mapped from peers on the host; sleeping engines,
other processes and the CUDA context on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from hybridengine import platform

GIB = 2**30
#: Share of the time that may go into the difference between RSS and PSS: the kernel walks all pages to tell it, which
#: takes 6 ms per GiB.
SHARED_COST = 0.005
_CLEAR_REFS, _SMAPS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/smaps_rollup"), Path("/proc/self/status")


class HostMemory(NamedTuple):
    """This process's memory in bytes: PSS counts a page shared by n processes as 1/n of a page."""

    pss: int
    rss: int
    peak_rss: int


def host_memory() -> HostMemory:
    """Now. ``peak_rss`` since the last :func:`reset_host_peak`."""
    pss = _kib(_SMAPS, "Pss")
    status = _STATUS.read_text()
    return HostMemory(pss, _kib_in(status, "VmRSS"), _kib_in(status, "VmHWM"))


def reset_host_peak() -> bool:
    """Start a new high-water mark; False where the system does not allow it (peaks are then since the start)."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _kib(path: Path, name: str) -> int:
    return _kib_in(path.read_text(), name)


def _kib_in(text: str, name: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@dataclass(slots=True)
class PhaseMemory:
    """What one run of one phase used, in bytes.

    Attributes:
        used, peak: on the device that the model is on (host memory on CPU), at the end and at most.
        host_used, host_peak: host memory; the same numbers on CPU.
        owners: bytes of each owner on that device at the end of the phase.
        asleep: bytes of each owner that is elsewhere.
    """

    name: str
    used: int = 0
    peak: int = 0
    host_used: int = 0
    host_peak: int = 0
    owners: dict[str, int] = field(default_factory=dict)
    asleep: dict[str, int] = field(default_factory=dict)


class MemoryTracker:
    """Measures phases of one rank, nested ones too: a phase's peak includes those inside it.

    Args:
        device: where the model is.
        owners: bytes of each owner on the device and of each owner elsewhere, asked at the end of each phase
            (``lambda: (residency.sizes(), residency.sizes(on=State.HOST))``).
    """

    def __init__(
        self,
        device: torch.device,
        owners: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]] = lambda: ({}, {}),
    ) -> None:
        self.device, self._platform = device, platform.of(device)
        self.phases: list[PhaseMemory] = []  # of the step under way, in order of completion
        self.last_step: list[PhaseMemory] = []
        self.failed: str | None = None  # the innermost phase that an exception left
        self.watch: Callable[[PhaseMemory], None] = lambda run: None  # told of every phase at its end
        self.owners = owners
        self._open: list[PhaseMemory] = []
        self._resets = reset_host_peak()
        self._shared, self._look_again = 0, float("-inf")  # bytes of RSS that count for others

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseMemory]:
        """Measure what runs inside; nested phases are named by their path."""
        outer = self._open[-1] if self._open else None
        if outer is not None:
            self._close_interval(outer)
        own = PhaseMemory(f"{outer.name}/{name}" if outer else name)
        self._open.append(own)
        self._start_interval(own)
        try:
            yield own
        except BaseException:
            self.failed = self.failed or own.name
            raise
        finally:
            self._close_interval(own)
            self._open.pop()
            on_device, elsewhere = self.owners()
            own.owners = {owner: size for owner, size in on_device.items() if size}
            own.asleep = {owner: size for owner, size in elsewhere.items() if size}
            self.phases.append(own)
            if outer is not None:
                outer.peak = max(outer.peak, own.peak)
                outer.host_peak = max(outer.host_peak, own.host_peak)
                self._start_interval(outer)
        self.watch(own)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step so far, then start anew: ``memory/<phase>/{used,peak}_gib`` and the step's peak.

        On CUDA also ``memory/<phase>/host_peak_gib``; per owner ``memory/owner/<owner>_gib``, the most it held
        on the device at the end of any phase. A phase that ran several times reports its largest peak.
        """
        found: dict[str, float] = {}
        for run in self.phases:
            values = {f"memory/{run.name}/used_gib": run.used, f"memory/{run.name}/peak_gib": run.peak}
            if self._platform.separate_memory:
                values[f"memory/{run.name}/host_peak_gib"] = run.host_peak
            values |= {f"memory/owner/{owner}_gib": size for owner, size in run.owners.items()}
            for key, value in values.items():
                found[key] = max(found.get(key, 0.0), value / GIB)
        if self.phases:
            found["memory/peak_gib"] = max(run.peak for run in self.phases) / GIB
        self.last_step, self.phases = self.phases, []
        return found

    def _start_interval(self, run: PhaseMemory) -> None:
        used, _ = self._device_now()
        run.peak = max(run.peak, used)
        self._platform.reset_peak(self.device)
        if self._resets:
            reset_host_peak()

    def _close_interval(self, run: PhaseMemory) -> None:
        status = _STATUS.read_text()
        rss, peak_rss = _kib_in(status, "VmRSS"), _kib_in(status, "VmHWM")
        if (begin := time.monotonic()) >= self._look_again:
            self._shared, end = rss - _kib(_SMAPS, "Pss"), time.monotonic()
            self._look_again = end + (end - begin) / SHARED_COST
        run.host_used = rss - self._shared
        run.host_peak = max(run.host_peak, run.host_used + (peak_rss - rss if self._resets else 0))
        if self._platform.separate_memory:
            run.used, peak = self._device_now()
            run.peak = max(run.peak, peak)
        else:
            run.used, run.peak = run.host_used, max(run.peak, run.host_peak)

    def _device_now(self) -> tuple[int, int]:
        """(used, peak since the last reset) on a device with memory of its own; else zeros."""
        memory = self._platform.memory(self.device)
        return (0, 0) if memory is None else (memory.used, memory.peak)
