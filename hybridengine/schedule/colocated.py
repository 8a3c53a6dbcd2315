"""ColocatedRollouts: every rank generates, then every rank trains. Schedules ``sync`` and ``partial``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hybridengine.config import Config
from hybridengine.data.loader import PromptLoader
from hybridengine.distributed.errors import agree
from hybridengine.distributed.exchange import all_gather_trajectories
from hybridengine.distributed.world import World, replica_group
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.sharding import ShardingManager
from hybridengine.phases import Phases
from hybridengine.rewards.scorer import Scorer
from hybridengine.schedule.claims import Claims
from hybridengine.schedule.pool import Group, in_order, make_pool
from hybridengine.schedule.recorder import recorder_of
from hybridengine.schedule.recovery import Recovery, restorer
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
        self.handoff = sharding.handoff.method
        self.recovery = Recovery(sharding, phases)
        self.pool = make_pool(config)
        self._params = sampling_params(config)
        self._lengths: dict[str, float] = {}  # mean response length by prompt text, for the order only
        self._rollouts = 0
        engine, tp = sharding.rollout, config.rollout.tp
        self._scores = world.rank % tp == 0
        scorer.spread(world.rank % tp, tp)
        self._scoring: list[float] = []  # what it cost, of the last batch
        self._recorder = recorder_of(config, engine.replica, writes=self._scores)
        self._replica_group = replica_group(world, tp) if engine.num_replicas > 1 else None

    def next(self) -> tuple[list[Trajectory], dict[str, float]]:
        self.pool.trained()
        with self.phases("data"):
            self.pool.admit(self.loader.take(self.pool.capacity()))
            groups = in_order(self.pool.open, self._lengths)
        restore = restorer(sample for group in groups for sample in group.unfinished())
        found = self.recovery.run(lambda engine: self._generate(engine, groups), undo=lambda: self._undo(restore))
        with self.phases("reward"), agree("scoring"):
            self.scorer.collect()
            self._scoring = self.scorer.take_stats()
        with self.phases("exchange"):
            prompts = [group.prompt for group in groups]
            for sample in all_gather_trajectories(self._mine(found), prompts):
                self.pool.update(sample, finished=sample.reward is not None)
            batch = self.pool.take()
        assert batch is not None, "a rollout ended without a batch"
        self._learn_lengths(batch[0])
        return batch

    def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Trajectory]:
        def answer(engine: RolloutEngine) -> list[Trajectory]:
            mine = list(prompts)[engine.replica :: engine.num_replicas]
            return engine.generate(mine, params, seed=self.config.seed, step=-1, on_finished=self.scorer.submit)

        found = self.recovery.run(answer, undo=self.scorer.discard)
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
        stream = self._recorder.watch(engine.stream(self._params, seed=self.config.seed))
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
            if stops_early and claims.completed(complete) >= enough:
                found += [sample for sample in stream.interrupt() if sample.token_ids]
                break
        self._recorder.flush(engine.weights_version)
        return found

    def _undo(self, restore: Callable[[], None]) -> None:
        self.scorer.discard()
        restore()

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


def sampling_params(config: Config) -> SamplingParams:
    """How training samples are drawn."""
    r = config.rollout
    return SamplingParams(
        n=r.samples_per_prompt, max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k
    )
