"""ColocatedRollouts: every rank generates, then every rank trains. Schedules ``sync`` and ``partial``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hybridengine.config import Config
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.errors import agree
from hybridengine.distributed.exchange import all_gather_trajectories
from hybridengine.distributed.layout import RolloutLayout
from hybridengine.distributed.world import World, replica_group
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.rollout.generate import generate
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import ROLLOUT
from hybridengine.rewards.scorer import Scorer
from hybridengine.sampling import training_params
from hybridengine.schedule.claims import Claims
from hybridengine.schedule.pool import Group, in_order, make_pool
from hybridengine.schedule.recorder import recorder_of
from hybridengine.schedule.recovery import Recovery, restorer
from hybridengine.sync.sharding import ShardingManager
from hybridengine.types import Prompt, SamplingParams, Trajectory


class ColocatedRollouts:
    """See RolloutSource.

    ``sync`` generates exactly one batch. ``partial`` starts more groups than a batch needs and stops as soon as enough
    are complete; the others keep what they have (tokens, log-probabilities, versions) and go on in the next step.
    Groups are served by whichever replica has room, the longest expected first; a sample's random numbers belong to it
    and not to its replica, so who served it changes nothing.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        sharding: ShardingManager,
        scorer: Scorer,
        loader: PromptLoader,
        phases: Phases,
    ) -> None:
        self.config, self.world, self.sharding = config, world, sharding
        self.scorer, self.loader, self.phases = scorer, loader, phases
        self.transfer = sharding.weight_sync.transfer.method
        self.recovery = Recovery(sharding, phases)
        self.pool = make_pool(config)
        self._params = training_params(config)
        self._lengths: dict[str, float] = {}  # mean response length by prompt text, for the order only
        self._rollouts = 0
        self._groups: list[Group] = []  # of the rollout under way
        self._found: list[Trajectory] = []  # this replica's samples of it
        self._scoring: list[float] = []  # what scoring the last batch cost
        engine, layout = sharding.rollout, RolloutLayout(world.size, config.rollout.tp)
        self._scores = layout.is_leader(world.rank)
        scorer.spread(world.rank % layout.tp, layout.tp)
        self._recorder = recorder_of(config, engine.replica, writes=self._scores)
        self._replica_group = replica_group(world, layout.tp) if engine.num_replicas > 1 else None

    def start_step(self) -> None:
        self.pool.mark_trained()

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        with self.phases("data"):
            self.pool.admit(self.loader.take(self.pool.capacity()))
            self._groups = in_order(self.pool.open, self._lengths)
        restore = restorer(sample for group in self._groups for sample in group.unfinished())

        def undo() -> None:
            self.scorer.discard()
            restore()

        return self.recovery.attempts(undo)

    def enter_rollout_mode(self) -> None:
        self.sharding.enter_rollout_mode()

    def generate(self) -> None:
        with self.phases("rollout", ROLLOUT):
            self._found = self._generate(self.sharding.rollout, self._groups)

    def rewards(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        with self.phases("reward"), agree("scoring"):
            self.scorer.collect()
            self._scoring = self.scorer.take_stats()
        with self.phases("exchange"):
            prompts = [group.prompt for group in self._groups]
            for sample in all_gather_trajectories(self._mine(self._found), prompts):
                self.pool.update(sample, finished=sample.reward is not None)
            batch = self.pool.take()
        if batch is None:  # groups without a signal were replaced: another round, with the same weights
            assert self.pool.replacement is not None, "a rollout ended without a batch"
            return None
        self._recorder.flush(self.sharding.rollout.weights_version)
        self._learn_lengths(batch[0])
        return batch

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Trajectory]:
        engine = self.sharding.rollout
        mine = list(prompts)[engine.replica :: engine.num_replicas]
        found: list[Trajectory] = []
        for attempt in self.recovery.attempts(self.scorer.discard):
            with attempt:
                self.enter_rollout_mode()
                with self.phases("rollout", ROLLOUT):
                    found = generate(
                        engine, mine, params, seed=self.config.seed, step=-1, on_finished=self.scorer.submit
                    )
        with self.phases("reward"), agree("scoring"):
            self.scorer.collect()
            self.scorer.take_stats()  # the metrics are of training batches
        with self.phases("exchange"):
            return all_gather_trajectories(self._mine(found), prompts)

    def _mine(self, found: list[Trajectory]) -> list[Trajectory]:
        """Those that this rank of its replica has scored."""
        return [sample for sample in found if self.scorer.owns(sample)]

    def _generate(self, engine: RolloutEngine, groups: Sequence[Group]) -> list[Trajectory]:
        """This replica's samples: finished ones (being scored), and interrupted ones that have something."""
        slots = self.config.rollout.max_num_seqs
        enough = self.pool.batch - self.pool.ready  # complete groups, over all replicas
        stops_early = len(groups) > enough
        claims = Claims(
            len(groups), replica=engine.replica, replicas=engine.num_replicas, slots=max(1, slots // self._params.n),
            stealing=self.config.rollout.work_stealing, key=f"rollout/{self._rollouts}", group=self._replica_group,
        )  # fmt: skip
        self._rollouts += 1
        stream = self._recorder.watch(
            engine.stream(self._params, seed=self.config.seed, interruptible=stops_early)
        )  # fmt: skip
        left: dict[int, int] = {}  # group -> samples that are not finished
        waiting: deque[tuple[Trajectory, int]] = deque()  # of claimed groups: no slot yet; and the step of their seeds
        found: list[Trajectory] = []
        more = True
        while True:
            while stream.running < slots and (more or waiting):
                if waiting:
                    sample, step = waiting.popleft()
                    stream.submit(sample, step=step)
                elif (position := claims.next()) is not None:
                    group = groups[position]
                    waiting.extend((sample, group.admitted_at) for sample in group.unfinished())
                    left[group.index] = len(waiting)
                else:
                    more = False
            if not stream.running:
                break
            complete = 0
            for sample in stream.step():
                found.append(sample)
                self.scorer.submit(sample)
                left[sample.prompt.index] -= 1
                complete += left[sample.prompt.index] == 0
            if stops_early and claims.add_completed(complete) >= enough:
                found += [sample for sample in stream.interrupt() if sample.token_ids]
                break
        return found

    def _learn_lengths(self, batch: Sequence[Trajectory]) -> None:
        size = self._params.n
        for start in range(0, len(batch), size):
            group = batch[start : start + size]
            self._lengths[group[0].prompt.text] = sum(len(sample.token_ids) for sample in group) / size

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.pool.load_state_dict(state["pool"])

    def metrics(self) -> dict[str, float]:
        scoring = self.scorer.metrics(self._scoring)
        return self.sharding.metrics() | {"rollout/restarts": float(self.recovery.restarts)} | scoring

    def close(self) -> None:
        self.sharding.close()
