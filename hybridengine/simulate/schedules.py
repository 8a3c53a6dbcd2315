"""The schedules as sequences of events: who waits for whom, with the run's own SamplePool deciding what is admitted.

``Colocated`` follows schedule/colocated.py, ``Disaggregated`` follows schedule/remote.py and schedule/worker.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from hybridengine.schedule.pool import Group
from hybridengine.simulate.costs import Costs
from hybridengine.simulate.replica import Job, Replica
from hybridengine.simulate.scenario import Outcome, Scenario, Step
from hybridengine.types import Prompt, Trajectory


def simulate(scenario: Scenario, costs: Costs) -> Outcome:
    """Run an arm from an empty pool; deterministic."""
    return (Disaggregated if scenario.rollout_ranks else Colocated)(scenario, costs).run()


class Arm:
    """What both placements share; subclasses produce the batches."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        self.scenario, self.costs = scenario, costs
        self.pool = scenario.pool()
        self.replicas = [Replica(costs, scenario.slots) for _ in range(scenario.replicas)]
        self.now = 0.0
        self.waited = self.synced = 0.0
        self._jobs: dict[tuple[int, int], Job] = {}  # samples that are not finished
        self._prompts = self._make_prompts()

    def run(self) -> Outcome:
        steps: list[Step] = []
        before = self._usage()
        for number in range(self.scenario.steps):
            if number == self.scenario.warmup:
                before = self._usage()
            start, self.waited, self.synced = self.now, 0.0, 0.0
            batch, metrics = self._batch()
            lags = [self.version - sample.versions[0] for sample in batch]
            metrics |= {"lag/mean": sum(lags) / len(lags), "lag/max": float(max(lags))}
            responses = sum(len(sample.token_ids) for sample in batch)
            tokens = responses + len(batch) * self.scenario.prompt_tokens
            trained = self.costs.step + self.costs.train * tokens / self.scenario.train_ranks
            self.now += trained
            self.pool.mark_trained()
            steps.append(
                Step(
                    start=start, end=self.now, waited=self.waited, synced=self.synced, trained=trained, tokens=tokens,
                    response_tokens=responses, metrics=metrics,
                )
            )  # fmt: skip
        busy, sample_seconds, generated = (b - a for a, b in zip(before, self._usage(), strict=True))
        return Outcome(
            scenario=self.scenario, steps=steps, busy=busy, sample_seconds=sample_seconds, generated=int(generated),
            pool=self.pool,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """Of the policy: training steps done."""
        return self.pool.step

    def _batch(self) -> tuple[list[Trajectory], dict[str, float]]:
        raise NotImplementedError

    def _usage(self) -> tuple[float, float, float]:
        """Seconds of work up to now, samples × seconds and tokens up to each replica's last event."""
        return (
            sum(replica.busy + replica.under_way(self.now) for replica in self.replicas),
            sum(replica.sample_seconds for replica in self.replicas),
            float(sum(replica.tokens for replica in self.replicas)),
        )

    def _make_prompts(self) -> Iterator[Prompt]:
        index = 0
        while True:
            yield Prompt(index=index, token_ids=range(self.scenario.prompt_tokens))  # type: ignore[arg-type]
            index += 1

    def _admit(self, count: int) -> list[Group]:
        return self.pool.admit([next(self._prompts) for _ in range(count)])

    def _job(self, sample: Trajectory) -> Job:
        """The sample's own; a new one draws its length."""
        key = (sample.prompt.index, sample.sample_index)
        if key not in self._jobs:
            self._jobs[key] = Job(sample, self.scenario.lengths(*key), 0, [])
        return self._jobs[key]

    def _update(self, job: Job) -> bool:
        """Tell the pool what a sample has now; whether its group is complete."""
        finished = job.done == job.length
        if finished:
            del self._jobs[job.sample.prompt.index, job.sample.sample_index]
        return self.pool.update(job.trajectory(), finished=finished)


class Colocated(Arm):
    """Sync, rollout and training in turn on the same ranks."""

    def _batch(self) -> tuple[list[Trajectory], dict[str, float]]:
        self.synced = self.costs.sync
        begin = self.now + self.costs.sync
        self.now = begin
        while (batch := self._round()) is None:
            assert self.pool.replacement is not None, "a rollout ended without a batch"
        self.waited = self.now - begin
        return batch

    def _round(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        self._admit(self.pool.capacity())
        for replica in self.replicas:
            replica.wait(self.now, version=self.version)
        for job in self._rollout(self.pool.open):
            if job.done:
                self._update(job)
        self.now = max(replica.clock for replica in self.replicas) + self.costs.rollout
        return self.pool.take()

    def _rollout(self, groups: Sequence[Group]) -> list[Job]:
        """The jobs that ran, finished or stopped."""
        enough = self.pool.batch - self.pool.ready
        claim = self._claims(len(groups))
        left: dict[int, int] = {}
        found: list[Job] = []
        complete = 0

        def fill(number: int) -> None:
            replica = self.replicas[number]
            while replica.running + len(replica.queue) < replica.slots:
                position = claim(number)
                if position is None:
                    return
                unfinished = groups[position].unfinished()
                left[groups[position].index] = len(unfinished)
                for sample in unfinished:
                    replica.submit(self._job(sample), now=replica.clock)

        for number in range(len(self.replicas)):
            fill(number)
        if len(groups) > enough and enough <= 0:  # a batch is ready: stopped after the first engine step
            return [job for replica in self.replicas for job in halt(replica, math.nextafter(replica.clock, math.inf))]
        while any(replica.is_working for replica in self.replicas):
            number = min(range(len(self.replicas)), key=lambda n: self.replicas[n].next_event())
            for job in self.replicas[number].advance():
                found.append(job)
                left[job.sample.prompt.index] -= 1
                complete += left[job.sample.prompt.index] == 0
            if len(groups) > enough and complete >= enough:
                now = self.replicas[number].clock
                found += [job for replica in self.replicas for job in halt(replica, now)]
                break
            fill(number)
        return found

    def _claims(self, total: int) -> Callable[[int], int | None]:
        """Which group a replica serves next, as schedule/claims.py shares them out."""
        count = len(self.replicas)
        dealt = total
        if self.scenario.stealing and count > 1:
            dealt = min(total, count * max(1, self.scenario.slots // self.scenario.samples))
        own = [list(range(number, dealt, count)) for number in range(count)]
        shared = iter(range(dealt, total))

        def claim(number: int) -> int | None:
            return own[number].pop(0) if own[number] else next(shared, None)

        return claim


def halt(replica: Replica, now: float) -> list[Job]:
    """Stop a replica and drop its queue; returns the samples that were running."""
    stopped = replica.stop(now)
    replica.queue.clear()
    return stopped


class Disaggregated(Arm):
    """The controller's clock, and replicas that go their own way between its messages."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        super().__init__(scenario, costs)
        self._inbox: list[tuple[float, int, int, Job]] = []  # heap by (time of arrival, order), replica, finished job
        self._sent = 0
        self._running: list[dict[int, int]] = [{} for _ in self.replicas]  # as the controller sees it
        self._resubmit = False
        self._synced_version = -1

    def _batch(self) -> tuple[list[Trajectory], dict[str, float]]:
        begin = self.now
        if self.scenario.schedule == "one_step_off":
            while any(self._running):
                self._receive()
                if self.pool.replacement is not None:
                    self._admit_and_submit()
        self.waited = self.now - begin
        self._sync()
        begin = self.now
        self._admit_and_submit()
        while (batch := self.pool.take()) is None:
            self._admit_and_submit()
            while not self._receive():  # nothing changes for the pool before a group is complete
                pass
        if self.scenario.schedule == "partial":
            self._recall()
        elif self.scenario.schedule in ("one_step_off", "async"):
            self._admit_and_submit()
        self.waited += self.now - begin
        return batch

    def _usage(self) -> tuple[float, float, float]:
        for number in range(len(self.replicas)):
            self._catch_up(number)
        return super()._usage()

    # -- what the controller does --------------------------------------------------------------------

    def _sync(self) -> None:
        if self._synced_version == self.version:
            return
        begin = self.now
        for number, replica in enumerate(self.replicas):
            replica.queue.extendleft(reversed(self._stop(number)))  # before those that have not started
        self.now = max(self.now, *(replica.clock for replica in self.replicas)) + self.costs.sync
        for replica in self.replicas:
            replica.wait(self.now, version=self.version)
        self.synced, self._synced_version = self.now - begin, self.version

    def _admit_and_submit(self) -> None:
        count = self.pool.capacity(one_batch=self.scenario.schedule == "one_step_off")
        if self._resubmit:
            self._submit(self.pool.open)
            self._resubmit = False
        if count > 0:
            self._submit(self._admit(count))

    def _submit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            number = min(range(len(self.replicas)), key=lambda n: sum(self._running[n].values()))
            self._running[number][group.index] = len(group.unfinished())
            self._catch_up(number)
            for sample in group.unfinished():
                self.replicas[number].submit(self._job(sample), now=self.now)

    def _receive(self) -> bool:
        """The next finished sample that arrives; the controller's clock moves there. Whether it completes a group."""
        if not self._inbox:
            number = min(range(len(self.replicas)), key=lambda n: self.replicas[n].next_event())
            if self.replicas[number].next_event() == math.inf:
                raise RuntimeError(f"{self.scenario.name}: the trainer waits and no replica has work")
            self._take(number)
        arrival, _, number, job = heapq.heappop(self._inbox)
        self.now = max(self.now, arrival)
        running = self._running[number]
        running[job.sample.prompt.index] -= 1
        if not running[job.sample.prompt.index]:
            del running[job.sample.prompt.index]
        return self._update(job)

    def _recall(self) -> None:
        stopped: list[Job] = []
        for number, replica in enumerate(self.replicas):
            stopped += [*self._stop(number), *replica.queue]
            replica.queue.clear()
        self.now = max(self.now, *(replica.clock for replica in self.replicas))
        while self._inbox:
            self._receive()
        for job in stopped:
            if job.done:
                self._update(job)
        self._running = [{} for _ in self.replicas]
        self._resubmit = True

    # -- what the replicas do ------------------------------------------------------------------------

    def _take(self, number: int) -> None:
        """The replica's next event goes into the inbox."""
        self._send(number, self.replicas[number].advance())

    def _send(self, number: int, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._sent += 1
            arrival = self.replicas[number].clock + self.costs.latency
            heapq.heappush(self._inbox, (arrival, self._sent, number, job))

    def _catch_up(self, number: int) -> None:
        """All events of the replica up to now have happened."""
        while self.replicas[number].next_event() <= self.now:
            self._take(number)

    def _stop(self, number: int) -> list[Job]:
        """Stop a replica at its next engine step; the samples that are not finished."""
        self._catch_up(number)
        stopped = self.replicas[number].stop(self.now)
        self._send(number, [job for job in stopped if job.done == job.length])
        return [job for job in stopped if job.done < job.length]
