"""Where the time goes: named phases, their seconds per step, and a timeline for Perfetto.

Phases nest; a phase's seconds exclude those of the phases inside it, so a step's numbers add up:

    step wall time = Σ time/<phase> + unaccounted

A nested phase is named by its path, ``validation/rollout``, and so never mixes with the ``rollout`` of training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybridengine.distributed import errors

#: Phases that are not part of the training throughput.
OUTSIDE_THROUGHPUT = ("validation", "checkpoint")
#: Process number of the rollout replicas in a trace; ranks have theirs from 0.
REPLICAS = 1_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """One run of one phase.

    Attributes:
        name: path of the phase, ``outer/inner``.
        start, end: seconds since the timer was made.
        step: the step it belongs to; None outside of steps (engine start, the validation before step 1).
        thread: name of the thread it ran on.
    """

    name: str
    start: float
    end: float
    step: int | None
    thread: str = "main"

    @property
    def depth(self) -> int:
        """0 for a top-level phase."""
        return self.name.count("/")

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class _Frame:
    name: str
    start: float
    children: float = 0.0


@dataclass(slots=True)
class _Step:
    number: int
    start: float
    exclusive: dict[str, float] = field(default_factory=dict)
    top_level: dict[str, float] = field(default_factory=dict)


class PhaseTimer:
    """Times phases of one rank.

    A collective that times out inside a phase raises an error with the phase's name. Phases on other threads
    (such as scoring during generation) appear in the timeline, not in the step's sums: they overlap with the
    main thread's phases.

    Args:
        synchronize: waits for the device; called at both ends of every phase, so that kernels count where they were
            launched.
        clock: seconds, monotonic.

    Attributes:
        started: when the timer was made, seconds since the epoch.
    """

    def __init__(
        self, *, synchronize: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.spans: list[Span] = []
        self._synchronize = synchronize
        self._clock = clock
        self._origin = clock()
        self.started = time.time()
        self._step: _Step | None = None
        self._next: _Step | None = None
        self._owner = threading.get_ident()
        self._stacks = threading.local()

    def now(self) -> float:
        """Seconds since the timer was made."""
        return self._clock() - self._origin

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside under ``name``; "/" is reserved for nesting."""
        if not name or "/" in name:
            raise ValueError(f"phase name {name!r}: must not be empty or contain '/'")
        stack = self._stack()
        path = f"{stack[-1].name}/{name}" if stack else name
        frame = _Frame(path, self._tick())
        stack.append(frame)
        try:
            with errors.phase(path):
                yield
        finally:
            end = self._tick()
            stack.pop()
            self._record(frame, end, parent=stack[-1] if stack else None)

    def start_step(self, step: int) -> None:
        """Begin step ``step``; phases until :meth:`end_step` belong to it.

        Each step but the first begins where the one before ended, so that what happens in between (such as logging)
        is not lost: the steps' times add up to the wall time.
        """
        if self._step is not None:
            raise ValueError(f"step {step} starts while step {self._step.number} is still running")
        self._step = self._next or _Step(step, self._tick())
        self._step.number = step

    def end_step(self, *, tokens: float = 0.0) -> dict[str, float]:
        """Finish the step and return its metrics.

        ``time/<phase>`` and ``time/step`` are in seconds. ``perf/unaccounted`` is the fraction of the step that
        no phase covers. ``perf/tokens_per_second`` is ``perf/tokens`` over the step's time without validation and
        checkpoint, which recur at another rhythm.
        """
        if self._step is None:
            raise ValueError("end_step without start_step")
        step, end = self._step, self._tick()
        self._step, self._next = None, _Step(step.number + 1, end)
        wall = end - step.start
        metrics = {f"time/{name}": seconds for name, seconds in step.exclusive.items()}
        metrics["time/step"] = wall
        metrics["perf/unaccounted"] = max(0.0, wall - sum(step.top_level.values())) / wall if wall > 0 else 0.0
        productive = wall - sum(step.top_level.get(name, 0.0) for name in OUTSIDE_THROUGHPUT)
        if tokens and productive > 0:
            metrics["perf/tokens"] = float(tokens)
            metrics["perf/tokens_per_second"] = tokens / productive
        return metrics

    def total(self, name: str) -> float:
        """Seconds of all runs of the phase with this path, children included."""
        return sum(span.seconds for span in self.spans if span.name == name)

    def _stack(self) -> list[_Frame]:
        if not hasattr(self._stacks, "frames"):
            self._stacks.frames = []
        frames: list[_Frame] = self._stacks.frames
        return frames

    def _tick(self) -> float:
        if threading.get_ident() == self._owner:
            self._synchronize()
        return self.now()

    def _record(self, frame: _Frame, end: float, *, parent: _Frame | None) -> None:
        seconds = end - frame.start
        on_main = threading.get_ident() == self._owner
        step = self._step or self._next
        thread = "main" if on_main else threading.current_thread().name
        self.spans.append(Span(frame.name, frame.start, end, step.number if step else None, thread))
        if parent is not None:
            parent.children += seconds
        if step is None or not on_main or frame.start < step.start:
            return
        step.exclusive[frame.name] = step.exclusive.get(frame.name, 0.0) + seconds - frame.children
        if parent is None:
            step.top_level[frame.name] = step.top_level.get(frame.name, 0.0) + seconds


def write_chrome_trace(
    path: Path, spans: Sequence[Span], *, rank: int = 0, replicas: Sequence[Sequence[tuple[float, float]]] = ()
) -> None:
    """Write spans as Chrome trace events (load in https://ui.perfetto.dev); one process per rank, one for the replicas.

    Args:
        replicas: per rollout replica, when its engine worked: (start, end) on the spans' clock.
    """
    threads = {name: number for number, name in enumerate(dict.fromkeys(["main", *(span.thread for span in spans)]))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            for name, number in threads.items()
        ),
        *(
            {
                "ph": "X",
                "name": span.name.rsplit("/", 1)[-1],
                "cat": "phase",
                "pid": rank,
                "tid": threads[span.thread],
                "ts": round(span.start * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "args": {"step": span.step, "path": span.name},
            }
            for span in sorted(spans, key=lambda span: (span.start, -span.end))
        ),
    ]
    if replicas:
        events.append({"ph": "M", "name": "process_name", "pid": REPLICAS, "args": {"name": "rollout engines"}})
    for number, busy in enumerate(replicas):
        name = {"name": f"replica {number}"}
        events.append({"ph": "M", "name": "thread_name", "pid": REPLICAS, "tid": number, "args": name})
        events += [
            {
                "ph": "X",
                "name": "generate",
                "cat": "rollout",
                "pid": REPLICAS,
                "tid": number,
                "ts": round(start * 1e6, 3),
                "dur": round((end - start) * 1e6, 3),
            }
            for start, end in busy
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
