"""Deals out what is to be scored: decodes, calls every function in time, and puts each result where it belongs."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Sequence

from hybridengine.rewards.base import RewardError, RewardFunction, call_of
from hybridengine.rewards.budget import TimeBudget
from hybridengine.rewards.decode import Decoder
from hybridengine.rewards.lanes import AsyncLane, Lane, Outcome
from hybridengine.rewards.service.pool import ForkServerHandle
from hybridengine.rewards.signatures import Call, Value
from hybridengine.rewards.stats import ScoringStats
from hybridengine.rewards.tasks import TIMEOUT, Failure, Job, Task, error_of, scores_zero
from hybridengine.types import Trajectory

logger = logging.getLogger(__name__)

#: How often calls that run in this process are held against their time limit, seconds.
TICK_SECONDS = 0.1
#: Failures of one reward function that are logged one by one.
LOGGED_FAILURES = 3


class Dispatcher:
    """One thread that decodes responses and queues a call per function; ``workers`` threads that make the calls.

    A job is done when each function has given its value, or when one has failed. Values of discarded jobs are dropped.

    Args:
        rewards: in the order of the configuration; functions with a ``share`` below 1 see that share of the samples.
        group_size: samples per prompt, for functions that take lists; see Scorer.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunction],
        decoder: Decoder,
        server: ForkServerHandle,
        *,
        stats: ScoringStats,
        budget: TimeBudget,
        workers: int,
        group_size: int,
        answer_key: str,
    ) -> None:
        self._rewards, self._decoder, self._server = rewards, decoder, server
        self._stats, self._budget = stats, budget
        self.workers, self._group_size, self._answer_key = workers, group_size, answer_key
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: flush
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._open: set[Task] = set()  # neither finished nor discarded
        self._lanes: list[Lane] = []
        self._failures: dict[str, int] = {}
        self._incomplete: dict[tuple[str, int], Task] = {}  # groups of functions that take lists, by (name, prompt)
        self._async: AsyncLane | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- any thread --------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """Score ``job``; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reward-dispatch", daemon=True)
            self._thread.start()
        self._inbox.put(job)

    def flush(self) -> None:
        """No more is coming for now: functions that take lists get what there is."""
        self._inbox.put(None)

    def discard(self, jobs: Sequence[Job]) -> None:
        """Forget ``jobs``; calls that are running for them are stopped, or left to themselves."""
        with self._lock:
            for job in jobs:
                job.discarded = True
            stale = {task for task in self._open if all(job.discarded for job in task.jobs)}
            self._open -= stale
            for task in stale:
                task.finished = True
            lanes = [lane for lane in self._lanes if lane.current in stale]
        for lane in lanes:
            lane.stop_current()
            if (current := lane.current) is not None and not current.reward.isolated:
                self._abandon(lane)

    def close(self) -> None:
        """End the threads and their worker processes."""
        self._closed = True
        self._inbox.put(None)
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            self._tasks.put(None)
            lane.abandon()
        if self._async is not None:
            self._async.close()

    # -- the dispatching thread --------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + TICK_SECONDS
        while not self._closed:
            try:
                job = self._inbox.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if job is None:
                    self._flush()
                elif not job.discarded:
                    self._accept(job)
            if time.monotonic() >= due:  # not with every job: a rollout has thousands
                self._expire()
                due = time.monotonic() + TICK_SECONDS

    def _accept(self, job: Job) -> None:
        """Decode, and queue a call of each function."""
        trajectory = job.trajectory
        chosen = [reward for reward in self._rewards if _in_share(reward, trajectory)]
        job.left = len(chosen)
        if not chosen:  # a reward model alone
            trajectory.rewards, trajectory.reward = {}, 0.0
            job.done.set()
            return
        try:
            text = self._decoder.decode(trajectory.token_ids)
        except Exception as error:  # noqa: BLE001  raised by Scorer.collect, on the thread that runs the step
            job.error = RewardError(f"decoding a response failed: {type(error).__name__}: {error}")
            job.error.__cause__ = error
            job.done.set()
            return
        for reward in chosen:
            response = text.special if reward.special_tokens else text.plain
            call = call_of(trajectory, response, answer_key=self._answer_key)
            if not reward.takes_lists:
                self._queue(Task(reward, [job], [call]))
                continue
            self._gather(reward, job, call)

    def _gather(self, reward: RewardFunction, job: Job, call: Call) -> None:
        """Put a sample to its group; queue the group when it is whole."""
        key = (reward.name, job.trajectory.prompt.index)
        group = self._incomplete.get(key)
        if group is None or group.jobs[0].discarded:  # a rollout that is repeated begins anew
            group = self._incomplete[key] = Task(reward, [], [])
        group.jobs.append(job)
        group.calls.append(call)
        if len(group.jobs) == self._group_size:
            self._queue(self._incomplete.pop(key))

    def _flush(self) -> None:
        """Queue what is left of groups, all of a function's in one list."""
        groups, self._incomplete = self._incomplete, {}
        for reward in self._rewards:
            rest = [task for task in groups.values() if task.reward is reward and not task.jobs[0].discarded]
            if rest:
                jobs = [job for task in rest for job in task.jobs]
                self._queue(Task(reward, jobs, [call for task in rest for call in task.calls]))

    def _queue(self, task: Task) -> None:
        with self._lock:
            self._open.add(task)
            if len(self._lanes) < min(self.workers, len(self._open)) and not task.reward.runs_on_loop:
                self._add_lane()
        if task.reward.runs_on_loop:
            if self._async is None:
                self._async = AsyncLane(finish=self._finish, limit=self._limit)
                self._async.start()
            self._async.put(task)
        else:
            self._tasks.put(task)

    def _expire(self) -> None:
        """Give up calls in this process that take too long: their threads can't be stopped, so others replace them."""
        now = time.monotonic()
        with self._lock:
            running = [(lane, lane.current) for lane in self._lanes]
        for lane, task in running:
            if task is None or task.started is None or task.reward.isolated:
                continue
            if now - task.started > task.reward.timeout_seconds:
                self._finish(task, Failure(TIMEOUT, f"still running after {task.reward.timeout_seconds:g} s"))
                self._abandon(lane)

    def _add_lane(self) -> None:
        lane = Lane(self._tasks, self._server, finish=self._finish, limit=self._limit, retried=self._stats.retried)
        self._lanes.append(lane)
        lane.start()

    def _abandon(self, lane: Lane) -> None:
        lane.abandon()
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)
                self._add_lane()

    # -- lanes' threads ----------------------------------------------------------------------------

    def _limit(self, reward: RewardFunction) -> float:
        return self._budget.limit(reward.name, reward.timeout_seconds)

    def _finish(self, task: Task, outcome: Outcome) -> None:
        """Put the values of a call into its jobs."""
        with self._lock:
            if task.finished:
                return
            task.finished = True
            self._open.discard(task)
        reward, failure = task.reward, outcome if isinstance(outcome, Failure) else None
        self._stats.finished(task, failure.kind if failure else None)
        assert task.started is not None
        seconds = time.monotonic() - task.started
        if failure is None:
            assert isinstance(outcome, list)
            values = outcome
            self._budget.ended(reward.name, seconds)
        else:
            if failure.kind == TIMEOUT and reward.isolated:
                self._budget.spend(seconds)
            error = None if scores_zero(reward, failure.kind) else error_of(task, failure)
            if error is None:
                self._log(task, failure)
            values = [Value(failure.score)] * len(task.jobs)
            for job in task.jobs:
                job.error = job.error or error
        with self._lock:
            complete = [job for job, value in zip(task.jobs, values, strict=True) if job.add(reward.name, value)]
        for job in complete:
            self._complete(job)

    def _complete(self, job: Job) -> None:
        """Weigh and write down what every function has given."""
        if job.error is None and not job.discarded:
            rewards: dict[str, float] = {}
            total = 0.0
            for reward in self._rewards:
                value = job.values.get(reward.name)
                if value is not None and value.score is not None:
                    rewards[reward.name] = value.score
                    total += reward.weight * value.score
                    rewards |= {f"{reward.name}/{name}": number for name, number in value.extras.items()}
            job.trajectory.rewards, job.trajectory.reward = rewards or {self._rewards[0].name: 0.0}, total
        job.done.set()

    def _log(self, task: Task, failure: Failure) -> None:
        """The first failures one by one; the metrics count all of them."""
        with self._lock:
            count = self._failures[task.reward.name] = self._failures.get(task.reward.name, 0) + 1
        if count <= LOGGED_FAILURES:
            last = " (no more of these are logged; the metric reward/errors counts them)"
            logger.warning(
                "%s; scored %g%s", error_of(task, failure), failure.score, last if count == LOGGED_FAILURES else ""
            )


def _in_share(reward: RewardFunction, trajectory: Trajectory) -> bool:
    """Whether ``reward`` sees this sample: always the same ones, as many as its share says on average."""
    if reward.share >= 1:
        return True
    name = f"{reward.name}/{trajectory.prompt.index}/{trajectory.sample_index}"
    return zlib.crc32(name.encode()) < reward.share * 2**32
