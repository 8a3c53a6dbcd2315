"""Scoring while generation runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from hybridengine.config import DataConfig, RewardConfig
from hybridengine.rewards.base import call_of
from hybridengine.rewards.budget import TimeBudget
from hybridengine.rewards.checks import check_answers
from hybridengine.rewards.decode import Decoder
from hybridengine.rewards.dispatch import Dispatcher
from hybridengine.rewards.load import load_audits, load_rewards, preloaded
from hybridengine.rewards.service.pool import new_server
from hybridengine.rewards.stats import ScoringStats, sum_over_ranks
from hybridengine.rewards.tasks import Job
from hybridengine.types import Prompt, Trajectory


class Scorer:
    """Fills in ``reward`` and ``rewards`` of trajectories.

    Life of a rollout: ``submit`` each trajectory as it completes, then ``collect``. The total reward is the weighted
        sum;
    ``rewards`` keeps each function's own value, in the order of the configuration, audits (``audit/<name>``) last.

    Args:
        config: the ``reward`` section.
        tokenizer: decodes responses; a copy is used, since a fast tokenizer must not be used by two threads at once.
        data: the ``data`` section, for the name of the answer's column.
        group_size: samples per prompt. A function that takes lists gets a prompt's samples together once all of them
            are there, and what is left in one list when :meth:`collect` is called; 0: everything then.

    Raises:
        ValueError: no reward configured, or one that can't be loaded.
    """

    def __init__(
        self, config: RewardConfig, tokenizer: Any, *, data: DataConfig | None = None, group_size: int = 0
    ) -> None:
        rewards = load_rewards(config)
        self.names = [reward.name for reward in rewards]  # accuracy is measured by the first
        self._rewards = rewards + load_audits(config)
        self._answer_key = data.answer_key if data is not None else "answer"
        self._workers = config.workers
        self._rank, self._ranks = 0, 1
        self._stats = ScoringStats([reward.name for reward in self._rewards])
        self._budget = TimeBudget(config.timeout_budget_seconds)
        self._server = new_server(preloaded(self._rewards), config.memory_gib)
        if any(reward.isolated for reward in self._rewards):
            self._server.start()
        decoder = Decoder(copy.deepcopy(tokenizer), skip_special_tokens=config.skip_special_tokens)
        self._dispatcher = Dispatcher(
            self._rewards, decoder, self._server,
            stats=self._stats, budget=self._budget, workers=config.workers, group_size=group_size,
            answer_key=self._answer_key,
        )  # fmt: skip
        self._pending: list[Job] = []  # in order of submission

    # -- before a run ------------------------------------------------------------------------------

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Hold the data against the functions, before anything expensive starts.

        Raises:
            ValueError: a column that a function needs is missing, or an answer that it can't use; names the row.
        """
        if prompts:
            first = Trajectory(
                prompt=prompts[0], sample_index=0, token_ids=[], logprobs=[], versions=[], truncated=False
            )
            for reward in self._rewards:
                reward.check_columns(call_of(first, "", answer_key=self._answer_key))
            check_answers(self._rewards, prompts, self._server, workers=self._workers)

    def spread(self, rank: int, ranks: int) -> None:
        """Ranks of a replica hold the same trajectories: this one scores its share."""
        self._rank, self._ranks = rank, ranks

    def stand_in_for(self, ranks: int) -> None:
        """Of a replica's ``ranks`` only this one scores: it makes as many calls at a time as all of them would."""
        self._dispatcher.workers = self._workers * ranks

    def owns(self, trajectory: Trajectory) -> bool:
        """Whether this rank scores ``trajectory``; a prompt's samples stay together where a function takes lists."""
        together = any(reward.takes_lists for reward in self._rewards)
        return (trajectory.prompt.index + (0 if together else trajectory.sample_index)) % self._ranks == self._rank

    # -- scoring -----------------------------------------------------------------------------------

    def submit(self, trajectory: Trajectory) -> None:
        """Start scoring ``trajectory``, unless that is another rank's; returns at once.

        What answers no prompt of the data (a negative index: probes of the engine) is worth nothing and not scored.
        """
        if self.owns(trajectory):
            job = Job(trajectory)
            self._pending.append(job)
            if trajectory.prompt.index < 0:
                trajectory.reward = 0.0
                job.done.set()
            else:
                self._dispatcher.put(job)

    def collect(self) -> list[Trajectory]:
        """Wait for everything submitted since the last call; the trajectories in the order of submission.

        Raises:
            RewardError: a reward function failed, and its ``on_error`` says that this ends the run. Nothing is pending
                afterwards.
        """
        jobs, self._pending = self._pending, []
        self._stats.waiting(time.monotonic())
        self._dispatcher.flush()
        try:
            return self._results(jobs)
        finally:
            self._stats.waiting(None)
            self._budget.renew()

    def poll(self) -> list[Trajectory]:
        """Those submitted that are scored by now, without waiting; they are no longer pending.

        Raises:
            RewardError: as :meth:`collect`, once it is known.
        """
        done: list[Job] = []
        pending: list[Job] = []
        for job in self._pending:
            (done if job.done.is_set() else pending).append(job)
        self._pending = pending
        return self._results(done)

    def discard(self) -> None:
        """Forget everything submitted since the last :meth:`collect`."""
        jobs, self._pending = self._pending, []
        self._dispatcher.discard(jobs)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Submit and collect."""
        for trajectory in trajectories:
            self.submit(trajectory)
        self.collect()

    def close(self) -> None:
        """End threads and worker processes."""
        self.discard()
        self._dispatcher.close()
        self._server.close()

    def _results(self, jobs: list[Job]) -> list[Trajectory]:
        for job in jobs:
            job.done.wait()
            if job.error is not None:
                self._dispatcher.discard(jobs)
                raise job.error
        return [job.trajectory for job in jobs]

    # -- metrics -----------------------------------------------------------------------------------

    def take_stats(self) -> list[float]:
        """What scoring cost on this rank since the last call, see ScoringStats; begins a new time budget."""
        self._budget.renew()
        return self._stats.take()

    def metrics(self, taken: Sequence[float]) -> dict[str, float]:
        """Collective over the default group: the metrics of what :meth:`take_stats` gave on each rank."""
        return self._stats.metrics([sum_over_ranks(taken)])
