"""Programs that a model wrote, run under sandlock: Landlock, seccomp and its supervisor, and the kernel's own limits.

What sandlock gives: no reading outside the interpreter's libraries, no writing at all, no network, no Unix sockets, no
signals to others, no new process. Its default list of refused system calls is extended (DENIED) by what Landlock leaves
open: chmod, chown, utime and extended attributes work on any file that one owns, whether it may be read or not; memory
files are beyond the memory limit; a sandbox started by root could set the clock or a real-time priority.

``strict`` needs a kernel that has every protection (Linux 6.12). ``degraded`` goes without the ones that are missing.
Where nothing can be confined, nothing runs.
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import selectors
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STRICT, DEGRADED = "strict", "degraded"
SANDBOXES = (STRICT, DEGRADED)

#: Beyond sandlock's own list. ``prlimit64`` keeps root from raising its limits.
DENIED = """
    fchmod fchmodat fchmodat2 fchown fchownat utimensat
    setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
    memfd_create memfd_secret prlimit64 setrlimit setpriority sched_setscheduler sched_setattr sched_setparam ioprio_set
    clock_settime settimeofday adjtimex clock_adjtime chroot mknodat mq_open mq_unlink
    inotify_init1 fanotify_init syslog vhangup setuid setgid setreuid setregid setresuid setresgid setgroups
    pidfd_open pidfd_getfd pidfd_send_signal process_madvise kcmp fsopen fspick fsmount move_mount open_tree
    mount_setattr mlock mlock2 mlockall remap_file_pages migrate_pages move_pages modify_ldt capset quotactl_fd
""".split()
#: Older forms of some of them, which other architectures do not have.
DENIED_X86 = "chmod chown lchown utime utimes futimesat mknod inotify_init".split()
#: Landlock ABI -> the protection that came with it, as sandlock names it, and Linux.
PROTECTIONS = {2: ("FS_REFER", "5.19"), 3: ("FS_TRUNCATE", "6.2"), 4: ("NET_TCP", "6.7"), 5: ("FS_IOCTL_DEV", "6.10")}
PROTECTIONS_ABI_6 = (("SIGNAL_SCOPE", "6.12"), ("ABSTRACT_UNIX_SOCKET_SCOPE", "6.12"))

#: Descriptors of a program; three are its pipes, the harness has two copies.
OPEN_FILES = 64

HARNESS = Path(__file__).with_name("harness.py")


class SandboxUnavailableError(ValueError):
    """Nothing can be confined here, or not as much as was asked for; says what is missing."""


class ProgramError(RuntimeError):
    """A program did not do what was asked of it: ``kind`` is ``timeout``, ``output``, ``ended`` or ``protocol``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# -- what this machine can do ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def landlock_abi() -> int:
    """The kernel's Landlock version, 0 where it has none or sandlock is not installed."""
    try:
        import sandlock
    except (ImportError, OSError):
        return 0
    return max(0, int(sandlock.landlock_abi_version()))


def missing_protections() -> list[str]:
    """Protections of ``strict`` that this kernel lacks, each with the Linux version that has it."""
    abi = landlock_abi()
    found = [f"{name} (Linux {linux})" for since, (name, linux) in PROTECTIONS.items() if abi < since]
    return found + [f"{name} (Linux {linux})" for name, linux in PROTECTIONS_ABI_6 if abi < 6]


def check_sandbox(mode: str) -> None:
    """Raises SandboxUnavailableError when programs can't be confined as ``mode`` says, with what is missing."""
    if mode not in SANDBOXES:
        raise ValueError(f"sandbox={mode}: must be one of {' | '.join(SANDBOXES)}")
    try:
        version("sandlock")
    except PackageNotFoundError:
        raise SandboxUnavailableError(
            "reward code needs the package sandlock (pip install sandlock), for Linux on x86-64 or aarch64"
        ) from None
    if landlock_abi() == 0:
        raise SandboxUnavailableError(
            "this kernel has no Landlock (Linux 5.13, and landlock in its lsm= list), so programs can't be confined"
        )
    if mode == STRICT and (missing := missing_protections()):
        raise SandboxUnavailableError(
            f"sandbox=strict: this kernel lacks {', '.join(missing)}; sandbox=degraded goes without"
        )


def try_sandbox(mode: str) -> None:
    """Run a program that counts and tries to read a file.

    Raises:
        SandboxUnavailableError: it can't be run, or could read the file.
    """
    check_sandbox(mode)
    attempt = f"open({str(HARNESS)!r}).close()"
    source = f"def probe():\n    try:\n        {attempt}\n    except OSError:\n        return 'confined'"
    try:
        with Program(source, mode="call", limits=Limits(), sandbox=mode) as program:
            answer = program.call("probe", (), {}, seconds=20.0)["v"]
    except (ProgramError, OSError, RuntimeError) as error:
        raise SandboxUnavailableError(f"a sandboxed program does not run here: {error}") from error
    if answer != "confined":
        raise SandboxUnavailableError("a sandboxed program could read a file of this package")


# -- policy --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one program.

    Attributes:
        memory_bytes: address space.
        output_bytes: of everything it writes.
        cpu_seconds: of processor time, in case it outlives its supervisor.
        packages: it may import what is installed beside the interpreter, such as numpy.
    """

    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 22
    cpu_seconds: float = 30.0
    packages: bool = False


@functools.lru_cache(maxsize=4)
def readable(packages: bool) -> tuple[str, ...]:
    """What programs may read: the interpreter, its standard library, the system's shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [os.path.realpath(sys.executable), paths["stdlib"], sysconfig.get_config_var("LIBDIR")]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    if packages:
        wanted += [paths["purelib"], paths["platlib"]]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in wanted if path and os.path.exists(path)))


def _policy(limits: Limits, sandbox: str) -> Any:
    import sandlock

    degraded = [getattr(sandlock.Protection, name) for name, _ in [*PROTECTIONS.values(), *PROTECTIONS_ABI_6]]
    return sandlock.Sandbox(
        fs_readable=list(readable(limits.packages)),
        clean_env=True,
        env={"PYTHONHASHSEED": "0"} | ({"PYTHONPATH": sysconfig.get_path("purelib")} if limits.packages else {}),
        cwd="/",
        max_processes=1,  # threads don't count
        no_coredump=True,
        extra_deny_syscalls=DENIED + (DENIED_X86 if platform.machine() == "x86_64" else []),
        allow_degraded=degraded if sandbox == DEGRADED else [],
    )


def confinement() -> Any:
    """What a worker that evaluates text in its own process puts on itself (Landlock only); None where there is none."""
    if landlock_abi() < 6:
        return None
    import sandlock

    libraries = [path for path in sys.path if path and os.path.isdir(path)]
    return sandlock.Sandbox(fs_readable=[*readable(True), *libraries, "/proc/self", "/usr/share", "/etc/localtime"])


# -- running -------------------------------------------------------------------------------------------


class Program:
    """One program in its sandbox, alive until the ``with`` block ends.

    Args:
        source: Python.
        mode: ``call`` or ``stdin``, see harness.py.
        limits, sandbox: what it may use.

    Raises:
        RuntimeError: no sandboxed process can be started.
    """

    def __init__(self, source: str, *, mode: str, limits: Limits, sandbox: str = STRICT) -> None:
        self._limits = limits
        self._nonce = _nonce()
        self._output = bytearray()
        self._read = 0  # bytes of output, those given out included
        self._process = self._start(sandbox)
        self._header = _framed((mode, self._nonce, source, "__main__" if mode == "stdin" else "program"))
        self._loaded = False

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, and everything of its process group; reap it."""
        self._process.kill()
        with suppress(OSError):
            os.close(self._pidfd)
        self._process.wait(timeout=5.0)
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                stream.close()

    def call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Call a function of the program: the harness's reply, with ``v`` (and ``m``, the arguments afterwards) or
        ``e``.

        The first call also loads the program, within its time.

        Raises:
            ProgramError: see there.
            ValueError: an argument that can't be given to a program.
        """
        deadline = time.monotonic() + seconds
        if not self._loaded:
            self._loaded = True
            reply = self._ask(self._header, self._nonce, deadline)
            if "e" in reply:
                return reply
        nonce = _nonce()
        return self._ask(_framed((nonce, function, args, kwargs)), nonce, deadline)

    def run(self, stdin: bytes, *, seconds: float) -> tuple[bytes, bool]:
        """Run the whole program on an input: what it printed, and whether it came to its end without an error.

        Raises:
            ProgramError: see there.
        """
        deadline, marker = time.monotonic() + seconds, b"\n" + self._nonce.encode() + b" "
        self._exchange(self._header + stdin, lambda output: _is_last_line(output, marker), deadline, close=True)
        printed, found, status = self._output.partition(marker)
        return bytes(printed), found == marker and status.strip() == b"ok"

    # -- pipes -------------------------------------------------------------------------------------

    def _start(self, sandbox: str) -> Any:
        from sandlock.sandbox import StdioMode

        command = [os.path.realpath(sys.executable), "-PsBS", "-c", _harness()]
        process = _policy(self._limits, sandbox).popen(
            command, stdin=StdioMode.PIPED, stdout=StdioMode.PIPED, stderr=StdioMode.NULL
        )
        try:
            pid = process.pid
            assert pid is not None
            self._pidfd = os.pidfd_open(pid)
            memory, cpu = self._limits.memory_bytes, int(self._limits.cpu_seconds) + 1
            # Before the program arrives: the harness waits for it.
            for kind, value in (
                (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CPU, cpu),
                (resource.RLIMIT_NOFILE, OPEN_FILES),
            ):  # fmt: skip
                resource.prlimit(pid, kind, (value, value))
            for stream in (process.stdin, process.stdout):
                os.set_blocking(stream.fileno(), False)
        except BaseException:
            process.kill()
            process.wait(timeout=5.0)
            raise
        return process

    def _ask(self, request: bytes, nonce: str, deadline: float) -> dict[str, Any]:
        from hybridengine.rewards.code.values import decode

        self._exchange(request, lambda output: len(output) >= 4 + int.from_bytes(output[:4], "big") > 4, deadline)
        length = int.from_bytes(self._output[:4], "big")
        content = bytes(self._output[4 : 4 + length])
        del self._output[: 4 + length]
        try:
            reply = decode(content)
        except ValueError as error:
            raise ProgramError("protocol", str(error)) from None
        if not isinstance(reply, dict) or reply.get("n") != nonce or not ("v" in reply or "e" in reply):
            raise ProgramError("protocol", "a reply to something else")
        return reply

    def _exchange(self, data: bytes, complete: Any, deadline: float, *, close: bool = False) -> None:
        """Write ``data`` and read until ``complete(output)``.

        Reading ends with the program, not with its output: something that it started may hold the pipe open.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        view, written = memoryview(data), 0
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(self._pidfd, selectors.EVENT_READ)
            if not stdin.closed:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not complete(self._output):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ProgramError("timeout", "still running at the time limit")
                ready = {key.fileobj for key, _ in selector.select(left)}
                if stdin in ready:
                    written = self._write(stdin, view, written)
                    if written >= len(data):
                        selector.unregister(stdin)
                        if close:
                            stdin.close()
                if stdout in ready and self._receive(stdout) == b"":
                    selector.unregister(stdout)
                if self._pidfd in ready:
                    while self._receive(stdout):
                        pass
                    if not complete(self._output):
                        raise ProgramError("ended", "the program ended")
                    return

    @staticmethod
    def _write(stdin: Any, view: memoryview, written: int) -> int:
        try:
            return written + (os.write(stdin.fileno(), view[written : written + 65536]) if written < len(view) else 0)
        except BlockingIOError:
            return written
        except BrokenPipeError:  # it does not want more
            return len(view)

    def _receive(self, stdout: Any) -> bytes | None:
        """Take what there is; b"" when nothing more will come, None when there is nothing now."""
        try:
            part = os.read(stdout.fileno(), 65536)
        except BlockingIOError:
            return None
        self._output += part
        self._read += len(part)
        if self._read > self._limits.output_bytes:
            raise ProgramError("output", f"more than {self._limits.output_bytes} bytes of output")
        return part


def _is_last_line(output: bytearray, marker: bytes) -> bool:
    position = output.rfind(marker)
    return position >= 0 and output.find(b"\n", position + len(marker)) >= 0


def _nonce() -> str:
    return os.urandom(12).hex()


def _framed(message: tuple[Any, ...]) -> bytes:
    """Raises ValueError for a message that marshal can't write."""
    import marshal

    content = marshal.dumps(message)
    return len(content).to_bytes(4, "big") + content


@functools.lru_cache(maxsize=1)
def _harness() -> str:
    return HARNESS.read_text()
