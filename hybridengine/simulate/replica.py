"""One rollout replica: slots, a queue, and engine steps of a known length."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from hybridengine.simulate.costs import Costs
from hybridengine.types import Trajectory


@dataclass(slots=True, eq=False)
class Job:
    """A sample to generate. ``done`` tokens of ``length`` exist; ``versions`` that sampled the first and the last."""

    sample: Trajectory
    length: int
    done: int
    versions: list[int]
    ends: int = 0  # engine step after which it is finished

    def trajectory(self) -> Trajectory:
        """A trajectory for the pool; its tokens are placeholders, only their number counts."""
        sample = self.sample
        sample.token_ids = range(self.done)  # type: ignore[assignment]
        sample.versions = list(self.versions)
        return sample


@dataclass(slots=True)
class Replica:
    """Between two events (a sample enters, ends or is stopped) all engine steps are alike, so they are not simulated
    one by one: the cost is in the events, not in the tokens.

    Attributes:
        slots: samples that run at once.
        clock: end of its last engine step, or of what it waited for.
        version: policy version it generates with.
        busy: seconds of engine steps so far.
        tokens: tokens generated so far; sample_seconds: running samples × seconds.
    """

    costs: Costs
    slots: int
    clock: float = 0.0
    version: int = 0
    busy: float = 0.0
    tokens: int = 0
    sample_seconds: float = 0.0
    queue: deque[Job] = field(default_factory=deque)
    _running: list[tuple[int, int, Job]] = field(default_factory=list)  # heap by (last step, order of entry)
    _steps: int = 0
    _entered: int = 0
    _context: int = 0
    _entering: int = 0  # tokens to be read in the next engine step
    _next: float | None = None  # next_event(), while it holds

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_working(self) -> bool:
        return bool(self._running or self.queue)

    def submit(self, job: Job, *, now: float) -> None:
        """Queue a sample; an idle replica starts at ``now``. Events before that must have been taken out."""
        if not self.is_working:
            self.clock = max(self.clock, now)
        self.queue.append(job)
        self._next = None

    def next_event(self) -> float:
        """When the next sample ends if nothing interferes; infinite without work."""
        if self._next is None:
            self._fill()
            self._next = math.inf
            if self._running:
                self._next = self.clock + self._seconds(self._running[0][0] - self._steps)
        return self._next

    def advance(self) -> list[Job]:
        """Go to the next event; the samples that end there."""
        self._fill()
        return self._go(self._running[0][0] - self._steps)

    def under_way(self, now: float) -> float:
        """Seconds of work since the last event."""
        return max(0.0, now - self.clock) if self._running else 0.0

    def stop(self, now: float) -> list[Job]:
        """Finish the engine step that is running at ``now`` and stop; unfinished samples in order of entry.

        All events before ``now`` must have been taken out; samples that end with this very step stay among those
        returned, with all their tokens (``done == length``).
        """
        self._fill()
        if self._running and self.clock < now:
            low, high = 1, self._running[0][0] - self._steps
            while low < high:  # the fewest steps that reach beyond now
                middle = (low + high) // 2
                low, high = (low, middle) if self.clock + self._seconds(middle) >= now else (middle + 1, high)
            ended = self._go(low)
        else:
            ended = []
        stopped = [job for _, _, job in sorted(self._running, key=lambda item: item[1])]
        for job in stopped:
            job.done = job.length - (job.ends - self._steps)
        self._running, self._context, self._entering = [], 0, 0
        self.wait(now)
        return [*ended, *stopped]

    def wait(self, until: float, *, version: int | None = None) -> None:
        """Stand still; then go on, with the weights of ``version``. Nothing may be running."""
        assert not self._running, "a replica that waits has been stopped"
        self.clock = max(self.clock, until)
        self.version = self.version if version is None else version
        self._next = None

    def _fill(self) -> None:
        while self.queue and len(self._running) < self.slots:
            job = self.queue.popleft()
            job.ends = self._steps + job.length - job.done
            tokens = len(job.sample.prompt.token_ids) + job.done
            self._entering += tokens
            self._context += tokens
            job.versions = [job.versions[0] if job.versions else self.version, self.version]
            heapq.heappush(self._running, (job.ends, self._entered, job))
            self._entered += 1

    def _seconds(self, steps: int) -> float:
        return self.costs.prefill * self._entering + self.costs.stretch(steps, len(self._running), self._context)

    def _go(self, steps: int) -> list[Job]:
        seconds, running = self._seconds(steps), len(self._running)
        self.clock += seconds
        self.busy += seconds
        self.tokens += steps * running
        self.sample_seconds += seconds * running
        self._steps += steps
        self._context += steps * running
        self._entering = 0
        self._next = None
        ended = []
        while self._running and self._running[0][0] == self._steps:
            job = heapq.heappop(self._running)[2]
            job.done = job.length
            self._context -= len(job.sample.prompt.token_ids) + job.length
            ended.append(job)
        return ended
