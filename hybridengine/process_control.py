"""What Linux lets a process ask for itself: to die with its parent, to adopt orphans, to have little memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; ``parent`` is that process's id.

    The signal follows the thread, not the process: whoever starts a process that calls this must do so from a thread
    that lives as long as the process is needed.
    """
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, which can then find, kill and reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def limit_memory(num_bytes: int) -> None:
    """Private writable memory (RLIMIT_DATA) of this process and of those that it starts, each.

    Not the address space: libraries map far more than they use.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def children(pid: int) -> list[int]:
    """Direct children of process ``pid``, [] when it is gone or the kernel does not tell."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def ancestors(pid: int) -> list[int]:
    """Parent, its parent and so on of process ``pid``, as far as the kernel tells."""
    found: list[int] = []
    try:
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
            found.append(pid)
    except OSError:
        pass
    return [pid for pid in found if pid > 0]


def is_python(pid: int) -> bool:
    """Whether a Python interpreter runs as process ``pid``; True where that is not to be known."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")  # whatever title the process has given itself
    except OSError:
        try:  # another user's
            with open(f"/proc/{pid}/cmdline") as file:
                program = file.read().split("\0")[0]
        except OSError:
            return True
    return "python" in os.path.basename(program)


def seconds_without_core(pid: int) -> float:
    """How long process ``pid`` has been ready to run while other processes had the cores; 0.0 where not known.

    The second number of /proc/<pid>/schedstat, nanoseconds (Documentation/scheduler/sched-stats.rst).
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
