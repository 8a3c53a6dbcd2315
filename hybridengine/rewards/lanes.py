"""Threads that call reward functions, in this process or in a worker process of the thread's own."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from hybridengine.rewards import signatures
from hybridengine.rewards.base import RewardFunction
from hybridengine.rewards.service.pool import STARTUP_SECONDS, ForkServerHandle, Worker, WorkerTimeoutError
from hybridengine.rewards.service.wire import BrokenWorkerError
from hybridengine.rewards.service.worker import Request
from hybridengine.rewards.signatures import ResultError, Value
from hybridengine.rewards.tasks import DIED, EXCEPTION, EXIT, MEMORY, REFUSED, TIMEOUT, VALUE, Failure, Task

#: Calls of async functions that run at the same time.
CONCURRENT_COROUTINES = 64

Outcome = list[Value] | Failure
#: Told of each task's outcome.
Finish = Callable[[Task, Outcome], None]
#: The time limit of a call, seconds.
Limit = Callable[[RewardFunction], float]


class Lane(threading.Thread):
    """Takes tasks from ``tasks`` until None comes, one at a time.

    Attributes:
        current: the task being run.
    """

    def __init__(
        self,
        tasks: queue.SimpleQueue[Task | None],
        server: ForkServerHandle,
        *,
        finish: Finish,
        limit: Limit,
        retried: Callable[[], None],
    ) -> None:
        # A daemon, as a function that hangs in this process can't be stopped and must not keep the process alive.
        super().__init__(name="reward", daemon=True)
        self.current: Task | None = None
        self._abandoned = False
        self._tasks, self._finish, self._limit, self._retried = tasks, finish, limit, retried
        self._worker = Worker(server)
        self._loaded: set[str] = set()  # by the worker process number _starts
        self._starts = 0

    def run(self) -> None:
        while not self._abandoned and (task := self._tasks.get()) is not None:
            if task.finished:  # discarded
                continue
            self.current, task.started = task, time.monotonic()
            outcome = self._remote(task) if task.reward.isolated else run_here(task)
            self.current = None
            self._finish(task, outcome)
        self._worker.kill()

    def abandon(self) -> None:
        """End after the current task, whenever that is; a worker process is killed now."""
        self._abandoned = True
        self._worker.kill()

    def stop_current(self) -> None:
        """End a task that runs in the worker process."""
        self._worker.kill()

    def _remote(self, task: Task) -> Outcome:
        reward = task.reward
        request = Request(reward.fn, reward.form, reward.kwargs, task.calls, confine=reward.fresh)
        for attempt in (1, 2):
            try:
                self._load(reward)
                reply = self._worker.ask(request, self._limit(reward))
            except WorkerTimeoutError as error:
                return Failure(TIMEOUT, str(error), cause=error)
            except BrokenWorkerError as error:
                if attempt == 2 or task.finished or self._abandoned:
                    return Failure(DIED, f"its worker process died twice: {error}", cause=error)
                self._retried()
                continue
            if reward.fresh:
                self._worker.kill()
            if "error" in reply:
                return Failure(**reply["error"])
            return [Value(score, extras) for score, extras in reply["values"]]
        raise AssertionError("not reached")

    def _load(self, reward: RewardFunction) -> None:
        """Import the function in a new worker first, so that the time limit is the call's own."""
        if self._starts != self._worker.starts:
            self._starts, self._loaded = self._worker.starts, set()
        if reward.fn not in self._loaded:
            self._worker.ask(Request(reward.fn, reward.form), STARTUP_SECONDS)  # an error comes again with the call
            self._starts = self._worker.starts
            self._loaded.add(reward.fn)


def run_here(task: Task) -> Outcome:
    """Call the function in this thread."""
    try:
        return task.reward.score(task.calls)
    except BaseException as error:  # noqa: BLE001  SystemExit must not end the run with status 0
        return failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """An exception of a function that ran in this process."""
    kinds: list[tuple[type[BaseException], str]] = [
        (ResultError, VALUE), (ValueError, REFUSED), (MemoryError, MEMORY), (Exception, EXCEPTION),
    ]  # fmt: skip
    kind = next((kind for of, kind in kinds if isinstance(error, of)), EXIT)
    message = str(error) if kind == VALUE else f"{type(error).__name__}: {error}"
    return Failure(kind, message, cause=error)


class AsyncLane(threading.Thread):
    """Runs async functions on an event loop of its own, many at a time."""

    def __init__(self, *, finish: Finish, limit: Limit) -> None:
        super().__init__(name="reward-async", daemon=True)
        self._finish, self._limit = finish, limit
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(CONCURRENT_COROUTINES)

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def put(self, task: Task) -> None:
        asyncio.run_coroutine_threadsafe(self._run(task), self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _run(self, task: Task) -> None:
        async with self._slots:
            if task.finished:
                return
            task.started = time.monotonic()
            self._finish(task, await self._outcome(task))

    async def _outcome(self, task: Task) -> Outcome:
        reward, limit = task.reward, self._limit(task.reward)
        try:
            coroutine = signatures.invoke(reward.function, reward.form, task.calls, reward.kwargs)
            result = await asyncio.wait_for(coroutine, limit)
            return signatures.values_of(result, reward.form, len(task.calls))
        except TimeoutError as error:
            return Failure(TIMEOUT, f"still running after {limit:g} s", cause=error)
        except BaseException as error:  # noqa: BLE001  as run_here
            return failure_of(error)
