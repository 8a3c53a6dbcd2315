"""Host memory that can still be taken: what the machine has, and what the control groups around this process allow.

Files in the page cache count as free, in a control group too: the kernel gives them up before it refuses or kills.
Swap does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: (limit, usage, counters of file pages) of a control group of version 2, and of version 1.
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
#: Version 1 has no word for "no limit", only a number as large as it goes.
_NO_LIMIT = 1 << 60


def host_gib() -> float:
    """Physical memory of this node in GiB, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def available_host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes. A few small files are read: about 0.2 ms. ``proc``, ``groups``: where the kernel shows itself."""
    lines = (proc / "meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([int(available.split()[1]) * 1024, *_left_in_groups(proc, groups)]))


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in every limited control group that this process is in, the outer ones included."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (groups / "memory", _V1) if controllers else (groups, _V2)
        inner = Path(path.lstrip("/"))  # inside a container it may not be there, but what is outermost is
        for group in (inner, *inner.parents):
            left = _left(mount / group, *names)
            if left is not None:
                yield left


def _left(group: Path, limit: str, usage: str, files: tuple[str, ...]) -> int | None:
    """None for a control group that has no limit or cannot be seen."""
    try:
        most = (group / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(most) - int((group / usage).read_text()) + sum(int(counters[name]) for name in files)
    except FileNotFoundError:
        return None
