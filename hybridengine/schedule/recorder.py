"""Record the work of one replica's engine: a line of ``rollout-<replica>.jsonl`` per weight update.

The simulator is calibrated from these lines, and the timeline of a run draws them. Sums, not samples: a line is as long
as the number of different batch sizes that occurred.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.config import Config
from hybridengine.engines.rollout.streaming import RolloutStream
from hybridengine.types import Trajectory

FILE = "rollout-{}.jsonl"
#: Seconds without a step that do not end a stretch of work.
GAP_SECONDS = 0.02


@dataclass(slots=True)
class Window:
    """From one weight update to the next.

    Attributes:
        version: policy version that generated.
        start, end: seconds since the epoch.
        busy: stretches of work, [start, end] each.
        decode: running samples -> engine steps without new samples, their seconds, and over those steps the sums of
            context (tokens of all running samples), context², context·seconds.
        prefill: running samples -> engine steps with new samples, their seconds, context, new samples, their tokens.
        lengths: finished samples, [prompt, sample, response tokens] each.
        interrupted: samples stopped before their end.
    """

    version: int
    start: float
    end: float = 0.0
    busy: list[list[float]] = field(default_factory=list)
    decode: dict[int, list[float]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    lengths: list[list[int]] = field(default_factory=list)
    interrupted: int = 0


class RolloutRecorder:
    """Watches the streams of one replica and writes what they did.

    An engine step counts from the end of the one before, so that what the caller does in between (scoring, messages,
    submitting) is part of its price; the first one counts from the first submission.

    Args:
        path: file to write; None records nothing (all ranks but the replica's first).
        append: a resumed run goes on in the file.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path | None, *, append: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._window = Window(-1, clock())
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not append:
                path.write_text("")
            elif path.exists():
                _end_last_line(path)

    def watch(self, stream: RolloutStream) -> RolloutStream:
        """The same stream, recorded."""
        return stream if self._path is None else _Recorded(stream, self)

    def flush(self, version: int) -> None:
        """End the window, during which ``version`` generated; nothing is written when nothing happened."""
        window, now = self._window, self._clock()
        if self._path is not None and window.busy:
            window.version, window.end = version, now
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(window)) + "\n")
        self._window = Window(-1, now)

    def now(self) -> float:
        return self._clock()

    def record_work(self, begin: float, end: float) -> None:
        """Join to the last stretch, or start a new one."""
        busy = self._window.busy
        if busy and begin - busy[-1][1] < GAP_SECONDS:
            busy[-1][1] = end
        else:
            busy.append([begin, end])

    def record_step(self, running: int, seconds: float, *, context: int, new: int, new_tokens: int) -> None:
        if new:
            _add(self._window.prefill, running, (1, seconds, context, new, new_tokens))
        else:
            _add(self._window.decode, running, (1, seconds, context, float(context) ** 2, context * seconds))

    def record_finished(self, samples: list[Trajectory]) -> None:
        self._window.lengths += [[s.prompt.index, s.sample_index, len(s.token_ids)] for s in samples]

    def record_interrupted(self, count: int) -> None:
        self._window.interrupted += count


class _Recorded:
    """A RolloutStream that reports to the recorder."""

    def __init__(self, stream: RolloutStream, recorder: RolloutRecorder) -> None:
        self._stream, self._recorder = stream, recorder
        self._since: float | None = None  # end of the last step, while samples were running
        self._context = self._new = self._new_tokens = 0

    @property
    def slots(self) -> int:
        return self._stream.slots

    @property
    def running(self) -> int:
        return self._stream.running

    def submit(self, trajectory: Trajectory, *, step: int) -> None:
        if self._since is None:
            self._since = self._recorder.now()
        self._new, self._new_tokens = self._new + 1, self._new_tokens + trajectory.length
        self._stream.submit(trajectory, step=step)

    def step(self) -> list[Trajectory]:
        recorder = self._recorder
        running, begin = self._stream.running, self._since if self._since is not None else recorder.now()
        self._context += self._new_tokens
        finished = self._stream.step()
        end = recorder.now()
        recorder.record_work(begin, end)
        recorder.record_step(
            running, end - begin, context=self._context, new=self._new, new_tokens=self._new_tokens
        )  # fmt: skip
        recorder.record_finished(finished)
        self._context += running - sum(sample.length for sample in finished)
        self._new = self._new_tokens = 0
        self._since = end if self._stream.running else None
        return finished

    def interrupt(self) -> list[Trajectory]:
        stopped = self._stream.interrupt()
        self._recorder.record_interrupted(len(stopped))
        return stopped


def _add(table: dict[int, list[float]], key: int, values: tuple[float, ...]) -> None:
    old = table.get(key, [0.0] * len(values))
    table[key] = [a + b for a, b in zip(old, values, strict=True)]


def recorder_of(config: Config, replica: int, *, writes: bool) -> RolloutRecorder:
    """The recorder of a run's replica. ``writes``: this rank is the replica's first."""
    directory = Path(config.output_dir)
    resumes = config.checkpoint.resume != "never" and (directory / "checkpoints").is_dir()
    return RolloutRecorder(directory / FILE.format(replica) if writes else None, append=resumes)


def read_windows(directory: Path) -> list[list[dict[str, Any]]]:
    """Per replica, the windows of a run in order, batch sizes as int; empty when the run recorded none. A line that was
    cut short, by a kill or a full disk, is left out."""
    found = []
    for path in sorted(directory.glob(FILE.format("*")), key=lambda path: (len(path.name), path.name)):
        windows = [window for line in path.read_text().splitlines() if (window := _window_of(line)) is not None]
        for window in windows:
            for table in ("decode", "prefill"):
                window[table] = {int(running): values for running, values in window[table].items()}
        found.append(windows)
    return found


def _window_of(line: str) -> dict[str, Any] | None:
    try:
        window = json.loads(line)
    except ValueError:
        return None
    return window if isinstance(window, dict) and {"decode", "prefill"} <= window.keys() else None


def _end_last_line(path: Path) -> None:
    """What comes next must not go on in a line that was cut short."""
    with path.open("rb+") as file:
        if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
            file.write(b"\n")
