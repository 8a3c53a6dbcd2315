"""Where every rank stands, when a phase takes too long or at SIGUSR1: stacks in files, one table on rank 0.

A rank that is stuck in a collective can't run Python, so a thread of its own watches each rank. Ranks talk through
files in ``<output_dir>/hang``, which works where the process groups no longer do:

    request           an id that somebody wrote: every rank answers it
    rank_<r>.json     the answer: phase, seconds in it, the collective that it waits in, who called it
    rank_<r>.txt      the stacks of all threads of the rank
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from hybridengine.config import Config
from hybridengine.distributed import errors
from hybridengine.distributed.world import World

#: A phase is overdue after this many times its longest run so far, but not before so many seconds.
TIMES, LEAST_SECONDS = 5.0, 30.0
POLL_SECONDS, ANSWER_SECONDS = 1.0, 5.0
#: Files whose functions wait for other ranks.
_WAITS = ("torch/distributed/distributed_c10d.py", "platform/cpu/shared_collectives.py", "distributed/links.py",
    "distributed/mailbox.py",
)  # fmt: skip
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands.

    Attributes:
        phase, seconds: the innermost phase of its main thread, and for how long.
        waits_in: the function that waits for other ranks; None while it does something itself.
        at: the innermost line of this package outside of such functions, ``file:line function``.
    """

    phase: str
    seconds: float
    waits_in: str | None
    at: str


def position() -> Position:
    """Of this process's main thread; may be called from any thread."""
    name, since = errors.main_phase()
    main = threading.main_thread().ident
    waits_in, at = None, "outside of this package"
    for file, line, function in _frames(sys._current_frames().get(main or 0)):
        if file.endswith(_WAITS):
            waits_in = function if not function.startswith("_") or waits_in is None else waits_in
        elif file.startswith(_PACKAGE) and not file.endswith("distributed/errors.py"):
            at = f"{file.removeprefix(_PACKAGE)}:{line} {function}"
            break
    return Position(name, time.monotonic() - since, waits_in, at)


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """Innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def hang_watch(config: Config, world: World) -> HangWatch | None:
    """The watch of this rank, not started yet; None with ``distributed.hang_report=false``.

    Call it before the process groups are made: their backend reads then what it is to record.
    """
    if not config.distributed.hang_report:
        return None
    directory = Path(config.output_dir).absolute() / "hang"
    world.platform.record_collectives(directory)
    report = logging.getLogger("hybridengine").warning
    limit = config.distributed.timeout_seconds
    return HangWatch(directory, world.rank, world.size, limit_seconds=limit, report=report)


class HangWatch:
    """Watches one rank from :meth:`start` to :meth:`close`.

    Args:
        directory: shared by all ranks.
        limit_seconds: of one collective; a phase is reported after half of it at the latest.
        report: is given the table, on rank 0.
    """

    def __init__(
        self, directory: Path, rank: int, size: int, *, limit_seconds: float, report: Callable[[str], None]
    ) -> None:
        self.directory, self.rank, self.size = directory, rank, size
        self._limit, self._report = limit_seconds, report
        self._answered = ""
        self._over: set[str] = set()  # requests of earlier tables
        self._asked: tuple[str, float] | None = None  # the run of a phase that was reported
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._handlers: tuple[object, int] | None = None

    def start(self) -> None:
        """From the main thread."""
        self._answered = self._request()  # of an earlier run
        self._over = {self._answered}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Written by C code as the signal arrives, wherever the main thread is.
        fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers = (signal.signal(signal.SIGUSR1, lambda number, frame: None), fd)
        self._thread.start()

    def close(self) -> None:
        """From the main thread; harmless where it was not started, or is closed already."""
        if self._handlers is None:
            return
        handler, fd = self._handlers
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]
        self._handlers = None
        self._closed.set()
        os.write(self._write, b"\0")  # no signal's number: it need not wait for its next look
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    # -- the thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.is_set():
            if self._signalled() or self._overdue():
                with contextlib.suppress(OSError):
                    self.directory.mkdir(parents=True, exist_ok=True)
                    _replace(self.directory / "request", f"{uuid.uuid4().hex} {self.rank}")
            asked = self._request()
            if asked and asked != self._answered:
                self._answered = asked
                self._answer(asked)
                if self.rank == 0:
                    self._tell(asked)

    def _signalled(self) -> bool:
        """Whether SIGUSR1 came; waits a moment for it."""
        ready, _, _ = select.select([self._read], [], [], POLL_SECONDS)
        return bool(ready) and signal.SIGUSR1 in os.read(self._read, 4096)

    def _overdue(self) -> bool:
        name, since = run = errors.main_phase()
        if name == errors.OUTSIDE or run == self._asked:
            return False
        if time.monotonic() - since < self.allowed(name):
            return False
        self._asked = run
        return True

    def allowed(self, phase: str) -> float:
        """Seconds that a run of ``phase`` may take before it is reported."""
        longest = errors.longest_run(phase)
        late = self._limit / 2
        return late if longest is None else min(late, max(LEAST_SECONDS, TIMES * longest))

    def _request(self) -> str:
        try:
            return (self.directory / "request").read_text()
        except OSError:
            return ""

    def _answer(self, asked: str) -> None:
        with contextlib.suppress(OSError):
            with (self.directory / f"rank_{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            _replace(self.directory / f"rank_{self.rank}.json", json.dumps({"asked": asked, **asdict(position())}))

    def _tell(self, asked: str) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(found := self._answers()) < self.size and time.monotonic() < deadline:
            time.sleep(0.1)
        self._answered = self._request()  # several ranks may have asked at once: one table is enough
        self._over |= {asked, self._answered}
        self._report(table(found, self.size, by=int(asked.split()[1]), directory=self.directory))

    def _answers(self) -> dict[int, Position]:
        """Of ranks that have answered any request since the last table."""
        found = {}
        for rank in range(self.size):
            with contextlib.suppress(OSError, ValueError):
                told = json.loads((self.directory / f"rank_{rank}.json").read_text())
                if told.pop("asked") not in self._over:
                    found[rank] = Position(**told)
        return found


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    new.write_text(text)
    new.replace(path)


def table(found: dict[int, Position], size: int, *, by: int, directory: Path) -> str:
    """Who waits for whom. ``by``: the rank that asked."""
    lines = [f"where every rank stands (asked by rank {by}; stacks: {directory}/rank_*.txt)"]
    for rank in range(size):
        if (where := found.get(rank)) is None:
            lines.append(f"  rank {rank}  no answer: stopped, or gone")
            continue
        doing = f"waits in {where.waits_in}, called at" if where.waits_in else "is at"
        lines.append(f"  rank {rank}  {where.phase} for {where.seconds:.0f} s, {doing} {where.at}")
    waiting = [rank for rank, where in found.items() if where.waits_in]
    others = [rank for rank in range(size) if rank not in waiting]
    if waiting and others:
        lines.append(f"  rank(s) {_names(waiting)} wait for rank(s) {_names(others)}")
    elif waiting and len({(found[rank].waits_in, found[rank].phase) for rank in waiting}) > 1:
        lines.append("  every rank waits, and not for the same: they have taken different ways")
    elif waiting:
        lines.append("  every rank waits for the same: a slow or broken link, or a rank that was replaced")
    return "\n".join(lines)


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
