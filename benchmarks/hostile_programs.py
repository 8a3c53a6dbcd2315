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


def read_kinds() -> dict[str, tuple[str, str]]:
    """Kind -> (form, program), from the table beside this file. ``solve`` is what is called."""
    found: dict[str, list[str]] = {}
    forms: dict[str, str] = {}
    kind = ""
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("=== "):
            _, kind, forms_of = line.split()
            found[kind], forms[kind] = [], forms_of
        elif kind and not line.startswith("# "):
            found[kind].append(line)
    return {kind: (forms[kind], "\n".join(lines).strip("\n") + "\n") for kind, lines in found.items()}


KINDS = read_kinds()
#: Kinds that do no harm without a sandbox, and find what is expected there: otherwise they would prove nothing.
HARMLESS = (
    "read_secret", "read_secret_descriptor", "read_secret_path", "symlink", "hard_link", "watch", "tcp_listen",
    "proc_list", "environment", "shell", "new_program",
)  # fmt: skip


def control(kind: str, traps: Traps) -> bool:
    """Whether a program of this kind gets at what is expected when nothing holds it back."""
    program = one(kind, traps, n=random.randint(10**6, 10**7)).program
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(solve(3))"],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=traps.directory,
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
        if (state.st_mode & 0o777, state.st_mtime, state.st_uid) != (0o640, 1e9, os.getuid()) or os.listxattr(
            self.secret
        ):
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
    return [
        one(names[i % len(names)], traps, n=drawn.randint(1, 4) * 1000 + drawn.randint(0, 999)) for i in range(count)
    ]


def one(kind: str, traps: Traps, *, n: int = 1000) -> Hostile:
    """One program of a kind."""
    form, template = KINDS[kind]
    values = {
        "secret": traps.secret, "directory": traps.directory, "port": traps.port, "unix": traps.unix,
        "abstract": traps.abstract, "victim": traps.victim.pid, "n": n, "expected": traps.expected,
    }  # fmt: skip
    program = template
    for name, value in values.items():
        program = program.replace(f"@{name}@", str(value))
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
