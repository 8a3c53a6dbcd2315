"""Scoring while generation runs: threads that call the reward functions."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridengine.config import RewardConfig
from hybridengine.rewards.base import RewardError, RewardFunction
from hybridengine.rewards.load import load_rewards
from hybridengine.types import Trajectory


@dataclass(slots=True)
class _Job:
    trajectory: Trajectory
    response: str
    calling: str = ""  # the reward function now running
    started: float | None = None  # when it was called; None: no limit on it
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Scorer:
    """Fills in ``reward`` and ``rewards`` of trajectories.

    Life of a rollout: ``submit`` each trajectory as it completes, then ``collect``. The total reward is the
    weighted sum; ``rewards`` keeps each function's own value, in the order of the configuration.

    Args:
        config: the ``reward`` section.
        tokenizer: decodes responses, special tokens left out.

    Raises:
        ValueError: no reward configured, or one that can't be loaded.
    """

    def __init__(self, config: RewardConfig, tokenizer: Any) -> None:
        self._rewards: list[RewardFunction] = load_rewards(config)
        self._tokenizer = tokenizer
        self._timeout_seconds = config.timeout_seconds
        self._num_workers = config.workers
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending: list[_Job] = []

    @property
    def names(self) -> list[str]:
        """The reward functions' names, the first being the one that accuracy is measured by."""
        return [reward.name for reward in self._rewards]

    def submit(self, trajectory: Trajectory) -> None:
        """Start scoring ``trajectory``; returns at once."""
        # Decoded here: a fast tokenizer must not be used by two threads at the same time.
        response = self._tokenizer.decode(trajectory.token_ids, skip_special_tokens=True)
        job = _Job(trajectory, response)
        self._pending.append(job)
        while len(self._threads) < min(self._num_workers, len(self._pending)):
            # Daemons, as a reward function that hangs can't be stopped and must not keep the process alive.
            thread = threading.Thread(target=self._work, args=(self._queue,), name="reward", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(job)

    def collect(self) -> list[Trajectory]:
        """Wait for everything submitted since the last call; the trajectories in the order of submission.

        Raises:
            RewardError: a reward function raised, returned no finite number, or exceeded
                ``reward.timeout_seconds``. Nothing is pending afterwards.
        """
        jobs, self._pending = self._pending, []
        return self._finish(jobs)

    def poll(self) -> list[Trajectory]:
        """Those submitted that are scored by now, without waiting; they are no longer pending.

        Raises:
            RewardError: as :meth:`collect`, once it is known.
        """
        jobs, self._pending = self._pending, []
        ready: list[_Job] = []
        for job in jobs:
            (ready if job.done.is_set() or self._remaining(job) <= 0 else self._pending).append(job)
        return self._finish(ready)

    def discard(self) -> None:
        """Forget everything submitted since the last :meth:`collect`."""
        self._pending = []
        self._abandon()

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Submit and collect."""
        for trajectory in trajectories:
            self.submit(trajectory)
        self.collect()

    def close(self) -> None:
        """End the threads."""
        self._abandon()

    def _finish(self, jobs: list[_Job]) -> list[Trajectory]:
        try:
            for job in jobs:
                self._wait(job)
        except BaseException:
            self._abandon()
            raise
        return [job.trajectory for job in jobs]

    def _wait(self, job: _Job) -> None:
        """Until ``job`` is done. Its time counts from the call, not from the submission."""
        while not job.done.wait(self._remaining(job)):
            if self._remaining(job) <= 0:
                prompt = job.trajectory.prompt
                raise RewardError(
                    f"reward {job.calling} on prompt {prompt.index}, sample {job.trajectory.sample_index}: still "
                    f"running after reward.timeout_seconds={self._timeout_seconds:g}"
                )
        if job.error is not None:
            raise job.error

    def _remaining(self, job: _Job) -> float:
        started = job.started
        return self._timeout_seconds if started is None else started + self._timeout_seconds - time.monotonic()

    def _abandon(self) -> None:
        """Leave the threads to end by themselves and forget what is queued."""
        abandoned, self._queue = self._queue, queue.SimpleQueue()
        threads, self._threads = self._threads, []
        try:
            while True:
                abandoned.get_nowait()
        except queue.Empty:
            pass
        for _ in threads:
            abandoned.put(None)

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                self._score(job)
            except BaseException as error:  # re-raised by collect(), on the thread that runs the step
                job.error = error
            job.done.set()

    def _score(self, job: _Job) -> None:
        rewards: dict[str, float] = {}
        total = 0.0
        for reward in self._rewards:
            job.calling, job.started = reward.name, None if reward.limits_itself else time.monotonic()
            rewards[reward.name] = reward(job.trajectory, job.response)
            total += reward.weight * rewards[reward.name]
        job.trajectory.rewards = rewards
        job.trajectory.reward = total
