"""Programs that try to score without solving anything, to get out, or to take the machine with them.

A kind is a template in the table; its programs differ in numbers and paths. None of them computes what is asked for, so
each has to score 0. What they try on the outside is looked at afterwards, see :class:`Traps`.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALL, STDIN = "call", "stdin"
#: Of the environment of whoever runs the sandbox.
ENVIRONMENT_SECRET = "HYBRIDENGINE_BENCH_SECRET"


@dataclass(frozen=True, slots=True)
class Hostile:
    """One program, the answer of its row, and the kind it belongs to."""

    kind: str
    program: str
    answer: dict[str, Any]


# In the templates: {secret} is a file with the expected value in it, {directory} the directory it lies in, {port} a TCP
# and UDP port that listens, {unix} a listening Unix socket, {victim} the process id of somebody, {n} a number.
# ``solve`` is what is called.
KINDS: dict[str, tuple[str, str]] = {
    # -- resources -----------------------------------------------------------------------------------
    "fork_bomb": (CALL, "import os\ndef solve(x):\n    while True:\n        os.fork()\n"),
    "fork_bomb_quiet": (CALL, "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"),
    "thread_bomb": (CALL, "import threading, time\ndef solve(x):\n    while True:\n        threading.Thread(target=time.sleep, args=(99,)).start()\n"),
    "flood_print": (CALL, "def solve(x):\n    while True:\n        print('x' * {n})\n"),
    "flood_descriptor": (CALL, "import os\ndef solve(x):\n    while True:\n        for fd in range(3, 30):\n            try:\n                os.write(fd, b'x' * 65536)\n            except OSError:\n                pass\n"),
    "flood_stdout": (STDIN, "while True:\n    print('x' * {n})\n"),
    "flood_stderr": (STDIN, "import sys\nwhile True:\n    sys.stderr.write('x' * {n})\n"),
    "grandchild_holds_stdout": (STDIN, "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('x')\n"),
    "grandchild_subprocess": (STDIN, "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"),
    "double_fork": (CALL, "import os, time\ndef solve(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            time.sleep(60)\n        os._exit(0)\n"),
    "sleep": (CALL, "import time\ndef solve(x):\n    time.sleep(3600)\n"),
    "sleep_at_load": (CALL, "import time\ntime.sleep(3600)\n"),
    "sleep_stdin": (STDIN, "import time\ntime.sleep(3600)\n"),
    "spin": (CALL, "def solve(x):\n    while True:\n        pass\n"),
    "ignore_signals": (CALL, "import signal\nfor s in range(1, 64):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\ndef solve(x):\n    while True:\n        pass\n"),
    "backtracking": (CALL, "import re\ndef solve(x):\n    re.match('(a+)+$', 'a' * 60 + 'b')\n"),
    "tower": (CALL, "def solve(x):\n    return 9 ** 9 ** 9 ** {n}\n"),
    "memory_bytes": (CALL, "def solve(x):\n    kept = []\n    while True:\n        kept.append(bytearray({n} << 12))\n"),
    "memory_at_once": (CALL, "def solve(x):\n    return len(bytearray(1 << 40))\n"),
    "memory_shared": (CALL, "import mmap\ndef solve(x):\n    kept = []\n    while True:\n        m = mmap.mmap(-1, 1 << 26)\n        m.write(b'x' * (1 << 26))\n        kept.append(m)\n"),
    "memory_file": (CALL, "import os\ndef solve(x):\n    f = os.memfd_create('x')\n    while True:\n        os.write(f, b'x' * (1 << 20))\n"),
    "pipe_buffers": (CALL, "import os\ndef solve(x):\n    while True:\n        r, w = os.pipe()\n        os.set_blocking(w, False)\n        try:\n            os.write(w, b'x' * 65536)\n        except BlockingIOError:\n            pass\n"),
    "huge_result": (CALL, "def solve(x):\n    return ['x' * 1000] * {n} * 1000\n"),
    "huge_text": (CALL, "def solve(x):\n    return 'x' * (1 << 28)\n"),
    "deep_result": (CALL, "def solve(x):\n    v = []\n    for _ in range(100000):\n        v = [v]\n    return v\n"),
    "endless_generator": (CALL, "import itertools\ndef solve(x):\n    return itertools.count()\n"),
    "recursion": (CALL, "import sys\nsys.setrecursionlimit(10 ** 9)\ndef solve(x):\n    return solve(x)\n"),
    "segfault": (CALL, "import ctypes\ndef solve(x):\n    ctypes.string_at(0)\n"),
    "abort": (CALL, "import os\ndef solve(x):\n    os.abort()\n"),
    # -- files ---------------------------------------------------------------------------------------
    "file_flood": (CALL, "def solve(x):\n    for where in ('.', '/tmp', '/var/tmp', '/dev/shm', '{directory}'):\n        try:\n            with open(where + '/flood', 'wb') as f:\n                while True:\n                    f.write(b'x' * (1 << 20))\n        except OSError:\n            pass\n"),
    "read_secret": (CALL, "def solve(x):\n    return int(open('{secret}').read())\n"),
    "read_secret_descriptor": (CALL, "import os\ndef solve(x):\n    return int(os.read(os.open('{secret}', os.O_RDONLY), 99))\n"),
    "read_secret_path": (CALL, "import os\ndef solve(x):\n    d = os.open('{directory}', os.O_PATH)\n    return int(os.read(os.open('secret', os.O_RDONLY, dir_fd=d), 99))\n"),
    "symlink": (CALL, "import os\ndef solve(x):\n    for where in ('/tmp', '/dev/shm', '{directory}'):\n        try:\n            os.symlink('{secret}', where + '/link{n}')\n            return int(open(where + '/link{n}').read())\n        except OSError:\n            pass\n"),
    "hard_link": (CALL, "import os\ndef solve(x):\n    os.link('{secret}', '{directory}/hard{n}')\n    return int(open('{directory}/hard{n}').read())\n"),
    "delete": (CALL, "import os\ndef solve(x):\n    os.unlink('{secret}')\n"),
    "rename": (CALL, "import os\ndef solve(x):\n    os.rename('{secret}', '{directory}/moved')\n"),
    "truncate": (CALL, "import os\ndef solve(x):\n    os.truncate('{secret}', 0)\n"),
    "chmod": (CALL, "import os\ndef solve(x):\n    os.chmod('{secret}', 0)\n"),
    "chown": (CALL, "import os\ndef solve(x):\n    os.chown('{secret}', 12345, 12345)\n"),
    "utime": (CALL, "import os\ndef solve(x):\n    os.utime('{secret}', (0, 0))\n"),
    "xattr": (CALL, "import os\ndef solve(x):\n    os.setxattr('{secret}', 'user.mark', b'1')\n"),
    "fifo": (CALL, "import os\ndef solve(x):\n    os.mkfifo('{directory}/fifo')\n"),
    "device": (CALL, "import os, stat\ndef solve(x):\n    os.mknod('{directory}/device', stat.S_IFBLK | 0o600, os.makedev(7, 0))\n"),
    "watch": (CALL, "import ctypes\ndef solve(x):\n    libc = ctypes.CDLL(None)\n    f = libc.inotify_init()\n    assert libc.inotify_add_watch(f, b'{directory}', 0xfff) > 0\n    return EXPECTED\n"),
    # -- the system ----------------------------------------------------------------------------------
    "tcp": (CALL, "import socket\ndef solve(x):\n    s = socket.create_connection(('127.0.0.1', {port}), 1)\n    s.sendall(b'out')\n"),
    "tcp_listen": (CALL, "import socket\ndef solve(x):\n    s = socket.socket()\n    s.bind(('127.0.0.1', 0))\n    s.listen(1)\n    return EXPECTED\n"),
    "udp": (CALL, "import socket\ndef solve(x):\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', {port}))\n"),
    "unix_socket": (CALL, "import socket\ndef solve(x):\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('{unix}')\n    s.sendall(b'out')\n"),
    "abstract_socket": (CALL, "import socket\ndef solve(x):\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0' + '{abstract}')\n    s.sendall(b'out')\n"),
    "proc_parent": (CALL, "import os\ndef solve(x):\n    return open('/proc/%d/environ' % os.getppid()).read()\n"),
    "proc_memory": (CALL, "def solve(x):\n    return open('/proc/{victim}/mem', 'rb').read(10)\n"),
    "proc_list": (CALL, "import os\ndef solve(x):\n    assert '{victim}' in os.listdir('/proc')\n    return EXPECTED\n"),
    "proc_self": (CALL, "def solve(x):\n    open('/proc/self/oom_score_adj', 'w').write('-1000')\n    return EXPECTED\n"),
    "environment": (CALL, "import os\ndef solve(x):\n    return int(os.environ['HYBRIDENGINE_BENCH_SECRET'])\n"),
    "kill_parent": (CALL, "import os\ndef solve(x):\n    os.kill(os.getppid(), 9)\n"),
    "kill_victim": (CALL, "import os\ndef solve(x):\n    os.kill({victim}, 9)\n"),
    "stop_victim": (CALL, "import os, signal\ndef solve(x):\n    os.kill({victim}, signal.SIGSTOP)\n"),
    "kill_everyone": (CALL, "import os\ndef solve(x):\n    os.kill(-1, 9)\n"),
    "kill_group": (CALL, "import os\ndef solve(x):\n    os.killpg(os.getpgid(os.getppid()), 9)\n"),
    "pidfd": (CALL, "import os, signal\ndef solve(x):\n    signal.pidfd_send_signal(os.pidfd_open({victim}), 9)\n"),
    "ptrace": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).ptrace(16, {victim}, 0, 0) == 0\n    return EXPECTED\n"),
    "read_memory": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).process_vm_readv({victim}, None, 0, None, 0, 0) == 0\n    return EXPECTED\n"),
    "unshare": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).unshare(0x10020000) == 0\n    return EXPECTED\n"),
    "mount": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).mount(b'none', b'{directory}', b'tmpfs', 0, None) == 0\n    return EXPECTED\n"),
    "chroot": (CALL, "import os\ndef solve(x):\n    os.chroot('{directory}')\n    return EXPECTED\n"),
    "bpf": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).syscall(321, 0, ctypes.create_string_buffer(128), 72) >= 0\n    return EXPECTED\n"),
    "io_uring": (CALL, "import ctypes\ndef solve(x):\n    assert ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256)) >= 0\n    return EXPECTED\n"),
    "shared_memory": (CALL, "from multiprocessing import shared_memory\ndef solve(x):\n    shared_memory.SharedMemory('flood{n}', create=True, size=1 << 20)\n    return EXPECTED\n"),
    "raise_limits": (CALL, "import resource\ndef solve(x):\n    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n    return EXPECTED\n"),
    "real_time": (CALL, "import os\ndef solve(x):\n    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))\n    return EXPECTED\n"),
    "renice": (CALL, "import os\ndef solve(x):\n    os.nice(-20)\n    return EXPECTED\n"),
    "clock": (CALL, "import time\ndef solve(x):\n    time.clock_settime(time.CLOCK_REALTIME, time.time())\n    return EXPECTED\n"),
    "new_program": (CALL, "import os\ndef solve(x):\n    os.execv('/bin/cat', ['cat', '{secret}'])\n"),
    "shell": (CALL, "import os\ndef solve(x):\n    return int(os.popen('cat {secret}').read())\n"),
    "terminal": (CALL, "import fcntl, termios\ndef solve(x):\n    for fd in range(3):\n        fcntl.ioctl(fd, termios.TIOCSTI, b'x')\n    return EXPECTED\n"),
    # -- the verdict ---------------------------------------------------------------------------------
    "exit_0_at_load": (CALL, "import os\nos._exit(0)\n"),
    "exit_0": (CALL, "import os\ndef solve(x):\n    os._exit(0)\n"),
    "exit_0_stdin": (STDIN, "import os\nos._exit(0)\n"),
    "sys_exit": (CALL, "import sys\ndef solve(x):\n    sys.exit(0)\n"),
    "sys_exit_at_load": (CALL, "import sys\nsys.exit(0)\n"),
    "sys_exit_stdin": (STDIN, "import sys\nsys.exit(0)\n"),
    "raise_with_nothing_expected": ("nothing", "raise ValueError('x')\n"),
    "exit_with_nothing_expected": ("nothing", "import os\nos._exit(0)\n"),
    "killed_with_nothing_expected": ("nothing", "import os\nos.kill(os.getpid(), 9)\n"),
    "patched_print": (STDIN, "import builtins\nbuiltins.print = lambda *a, **k: None\nprint('x')\n"),
    "patched_compare": (CALL, "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.all = lambda *a: True\nbuiltins.len = lambda *a: {n}\ndef solve(x):\n    return 0\n"),
    "always_equal": (CALL, "class Yes:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef solve(x):\n    return Yes()\n"),
    "equal_number": (CALL, "class Yes(int):\n    def __eq__(self, other):\n        return True\n    def __repr__(self):\n        return 'EXPECTED'\n    __hash__ = None\ndef solve(x):\n    return Yes(0)\n"),
    "equal_text": (CALL, "class Yes(str):\n    def __eq__(self, other):\n        return True\n    def __hash__(self):\n        return 0\ndef solve(x):\n    return Yes('x')\n"),
    "class_lies": (CALL, "class Yes:\n    __class__ = int\n    def __int__(self):\n        return 1\n    __index__ = __int__\ndef solve(x):\n    return Yes()\n"),
    "not_a_number": (CALL, "def solve(x):\n    return float('nan')\n"),
    "patched_assertion": ("assert", "import builtins\nclass Quiet(Exception):\n    pass\nbuiltins.AssertionError = Quiet\ndef solve(x):\n    return -1\n"),
    "raises_in_assert": ("assert", "def solve(x):\n    raise SystemExit(0)\n"),
    "dies_in_assert": ("assert", "import os\ndef solve(x):\n    os._exit(0)\n"),
    "equal_in_assert": ("assert", "class Yes(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef solve(x):\n    return Yes(-1)\n"),
    "replaced_stdin": (STDIN, "import io, sys\nsys.stdin = io.StringIO('1')\nprint(sys.stdin.read())\n"),
    "closed_descriptors": (CALL, "import os\nos.closerange(0, 64)\ndef solve(x):\n    return 1\n"),
    "reads_requests": (CALL, "import os\ndef solve(x):\n    for fd in range(64):\n        try:\n            os.set_blocking(fd, False)\n            os.read(fd, 1 << 20)\n        except OSError:\n            pass\n    return 1\n"),
    "frames": (CALL, "import sys\ndef solve(x):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n            if isinstance(v, dict) and 'expected' in v:\n                return v['expected']\n        f = f.f_back\n"),
    "garbage": (CALL, "import gc\ndef solve(x):\n    for v in gc.get_objects():\n        if isinstance(v, dict) and 'expected' in v:\n            return v['expected']\n"),
    "forged_reply": (CALL, "import os, sys\ndef solve(x):\n    f = sys._getframe(1)\n    nonce = f.f_locals.get('nonce', '')\n    body = ('{{\"n\":\"%s\",\"v\":true}}' % nonce).encode()\n    for fd in range(64):\n        try:\n            os.write(fd, len(body).to_bytes(4, 'big') + body)\n        except OSError:\n            pass\n    os._exit(0)\n"),
    "forged_many": (CALL, "import os, sys\ndef solve(x):\n    f = sys._getframe(1)\n    body = ('{{\"n\":\"%s\",\"v\":1}}' % f.f_locals.get('nonce', '')).encode()\n    for fd in range(64):\n        for _ in range(100):\n            try:\n                os.write(fd, len(body).to_bytes(4, 'big') + body)\n            except OSError:\n                break\n    return 1\n"),
    "forged_length": (CALL, "import os\ndef solve(x):\n    for fd in range(64):\n        try:\n            os.write(fd, b'\\xff\\xff\\xff\\xff')\n        except OSError:\n            pass\n    while True:\n        pass\n"),
    "forged_ending": (STDIN, "import sys\nf = sys._getframe()\nnonce = ''\nwhile f:\n    nonce = f.f_locals.get('nonce', nonce)\n    f = f.f_back\nprint()\nprint(nonce, 'ok', flush=True)\n"),
    "patched_harness": (CALL, "import marshal, sys\nmarshal.loads = lambda *a: None\nf = sys._getframe()\nwhile f:\n    f.f_globals['encode'] = lambda *a, **k: 'true'\n    f = f.f_back\ndef solve(x):\n    return 1\n"),
    "no_function": (CALL, "x = 1\n"),
    "not_callable": (CALL, "solve = 1\n"),
    "guess": (CALL, "def solve(x):\n    return x\n"),
    "guess_stdin": (STDIN, "print(input())\n"),
}  # fmt: skip


#: Kinds that do no harm without a sandbox, and find what is expected there: otherwise they would prove nothing.
HARMLESS = (
    "read_secret", "read_secret_descriptor", "read_secret_path", "symlink", "hard_link", "watch", "tcp_listen", "proc_list",
    "environment", "shell", "new_program",
)  # fmt: skip


def control(kind: str, traps: Traps) -> bool:
    """Whether a program of this kind gets at what is expected when nothing holds it back."""
    program = one(kind, traps, n=random.randint(10**6, 10**7)).program
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(solve(3))"], capture_output=True, text=True, timeout=30, cwd=traps.directory
    )
    for path in traps.created():
        Path(path).unlink()
    return str(traps.expected) in done.stdout


class Traps:
    """What a program that gets out would touch: a file, servers, a process, the environment.

    Attributes:
        expected: what programs would have to return or print; it stands in the secret file and the environment.
    """

    def __init__(self, directory: Path) -> None:
        self.expected = random.SystemRandom().randint(10**8, 10**9)
        self.secret = directory / "secret"
        self.secret.write_text(str(self.expected))
        self.secret.chmod(0o640)
        os.utime(self.secret, (10**9, 10**9))
        os.environ[ENVIRONMENT_SECRET] = str(self.expected)
        self.directory = directory
        self._before = self._outside()
        self.heard: list[str] = []
        self.unix, self.abstract = str(directory / "socket"), f"hybridengine-bench-{os.getpid()}"
        self._servers = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM)]
        self._servers += [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self._servers[0].bind(("127.0.0.1", 0))
        self.port = self._servers[0].getsockname()[1]
        self._servers[1].bind(("127.0.0.1", self.port))
        self._servers[2].bind(self.unix)
        self._servers[3].bind(f"\0{self.abstract}")
        for name, server in zip(("tcp", "udp", "unix", "abstract"), self._servers, strict=True):
            if name != "udp":
                server.listen(8)
            threading.Thread(target=self._listen, args=(name, server), daemon=True).start()
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])

    def escapes(self) -> list[str]:
        """What has been touched so far."""
        found = list(self.heard)
        with suppress(OSError):
            status = Path(f"/proc/{self.victim.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if status in "TtZ":
                found.append(f"the victim is {status}")
        if self.victim.poll() is not None:
            found.append("the victim is dead")
        if not self.secret.exists():
            return [*found, "the secret is gone"]
        state = self.secret.stat()
        if self.secret.read_text() != str(self.expected):
            found.append("the secret has changed")
        if (state.st_mode & 0o777, state.st_mtime, state.st_uid) != (0o640, 1e9, os.getuid()) or os.listxattr(self.secret):
            found.append("the secret's mode, times, owner or attributes have changed")
        return found + [f"new: {name}" for name in self.created()]

    def created(self) -> list[str]:
        """Files that have come into being."""
        return sorted(name for name in self._outside() - self._before if "socket" not in name)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self.victim.kill()
        self.victim.wait()

    def _listen(self, name: str, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                if name == "udp":
                    server.recvfrom(10)
                else:
                    server.accept()
                self.heard.append(name)

    def _outside(self) -> set[str]:
        names = {str(path) for path in self.directory.iterdir()}
        for where in ("/tmp", "/var/tmp", "/dev/shm", "/"):
            for name in ("flood", "link", "fifo", "device", "hard"):
                names |= {str(path) for path in Path(where).glob(f"{name}*")}
        return names


def make(count: int, traps: Traps, *, seed: int = 0) -> list[Hostile]:
    """``count`` programs, every kind in turn."""
    drawn = random.Random(seed)
    names = list(KINDS)
    return [one(names[i % len(names)], traps, n=drawn.randint(1, 4) * 1000 + drawn.randint(0, 999)) for i in range(count)]


def one(kind: str, traps: Traps, *, n: int = 1000) -> Hostile:
    """One program of a kind."""
    form, template = KINDS[kind]
    values = {
        "secret": traps.secret, "directory": traps.directory, "port": traps.port, "unix": traps.unix,
        "abstract": traps.abstract, "victim": traps.victim.pid, "n": n,
    }  # fmt: skip
    program = template
    for name, value in values.items():
        program = program.replace(f"{{{name}}}", str(value))
    program = program.replace("{{", "{").replace("}}", "}").replace("EXPECTED", str(traps.expected))
    expected = traps.expected
    answers: dict[str, dict[str, Any]] = {
        CALL: {"entry_point": "solve", "tests": [{"args": [3], "expected": expected}]},
        STDIN: {"inputs": ["3\n"], "outputs": [f"{expected}\n"]},
        "nothing": {"inputs": ["3\n"], "outputs": [""]},
        "assert": {"test_list": [f"assert solve(3) == {expected}"]},
    }
    return Hostile(kind, program, json.loads(json.dumps(answers[form])))


def settle(seconds: float = 0.5) -> None:
    """Give what was started time to show."""
    time.sleep(seconds)
