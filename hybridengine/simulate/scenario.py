"""Scenario and Outcome: the input and the result of a simulation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from statistics import fmean

from hybridengine.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    DynamicSamplingConfig,
    RolloutConfig,
    ScheduleConfig,
)
from hybridengine.schedule.pool import Group, SamplePool, make_pool
from hybridengine.simulate.lengths import Lengths

OFF_POLICY = ("one_step_off", "async")
SCHEDULES = ("sync", "partial", *OFF_POLICY)
#: More than any pass rate worth simulating needs.
MAX_ROUNDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One arm. Names as in the configuration.

    Attributes:
        ranks: of the whole job.
        rollout_ranks: of them in the rollout pool; 0: colocated.
        slots: rollout.max_num_seqs, samples that one replica runs at once.
        prompt_tokens: of every prompt.
        in_order: async: schedule.order=start.
        pass_rate: dynamic sampling: share of groups whose rewards are not all equal; the others are replaced. 1: off.
        steps: simulated; the first ``warmup`` of them are left out of the figures.

    Raises:
        ValueError: an arm that does not exist.
    """

    schedule: str = "sync"
    ranks: int = 1
    rollout_ranks: int = 0
    tp: int = 1
    prompts: int = 64
    samples: int = 8
    slots: int = 256
    prompt_tokens: int = 0
    lengths: Lengths
    staleness: int = 4
    over_provision: float = 1.5
    stealing: bool = True
    in_order: bool = False
    pass_rate: float = 1.0
    steps: int = 40
    warmup: int = 8

    def __post_init__(self) -> None:
        generating = self.rollout_ranks or self.ranks
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule}: must be one of {', '.join(SCHEDULES)}")
        if not self.rollout_ranks and self.schedule in OFF_POLICY:
            raise ValueError(f"schedule={self.schedule}: ranks that do both can't generate while they train")
        if not 0 <= self.rollout_ranks < self.ranks:
            raise ValueError(f"rollout_ranks={self.rollout_ranks}: must leave ranks for training, of {self.ranks}")
        if self.tp < 1 or generating % self.tp:
            raise ValueError(f"tp={self.tp}: must divide the {generating} ranks that generate")
        for name in ("prompts", "samples", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not 0 < self.pass_rate <= 1:
            raise ValueError(f"pass_rate={self.pass_rate}: must be above 0, up to 1 (no dynamic sampling)")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup={self.warmup}: must be less than the steps={self.steps}")

    @property
    def name(self) -> str:
        """Such as ``disaggregated-2+6-async``: training ranks first."""
        placement = f"disaggregated-{self.train_ranks}+{self.rollout_ranks}" if self.rollout_ranks else "colocated"
        static = "" if self.stealing or self.rollout_ranks or self.replicas == 1 else "-static"
        return f"{placement}-{self.schedule}{'_in_order' if self.in_order else ''}{static}"

    @property
    def train_ranks(self) -> int:
        return self.ranks - self.rollout_ranks

    @property
    def replicas(self) -> int:
        return (self.rollout_ranks or self.ranks) // self.tp

    def with_(self, **changes: object) -> Scenario:
        return replace(self, **changes)  # type: ignore[arg-type]

    def pool(self) -> SamplePool:
        """The real one, as a run with this configuration would make it."""
        schedule = ScheduleConfig(
            name=self.schedule, staleness=self.staleness, over_provision=self.over_provision,
            order="start" if self.in_order else "completion",
        )  # fmt: skip
        rollout = RolloutConfig(samples_per_prompt=self.samples)
        dynamic = DynamicSamplingConfig(enable=self.pass_rate < 1, max_rounds=MAX_ROUNDS)
        pool = make_pool(
            Config(
                schedule=schedule,
                rollout=rollout,
                data=DataConfig(prompts_per_step=self.prompts),
                algorithm=AlgorithmConfig(dynamic_sampling=dynamic),
            )
        )
        if pool.replacement is not None:  # no rewards here: chance decides, for each prompt always alike
            pool.replacement = replace(pool.replacement, is_flat=self._is_flat)
        return pool

    def _is_flat(self, group: Group) -> bool:
        return random.Random(f"signal of {group.index}").random() >= self.pass_rate


@dataclass(slots=True, kw_only=True)
class Step:
    """One training step.

    Attributes:
        start, end, waited, synced, trained: seconds; ``waited`` for samples, draining included.
        tokens, response_tokens: of its batch.
        metrics: the pool's, and ``lag/mean`` and ``lag/max``: policy versions between a sample's first token and its
            training.
    """

    start: float
    end: float
    waited: float
    synced: float
    trained: float
    tokens: int
    response_tokens: int
    metrics: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All steps of an arm, and what its replicas had done when the warm-up ended and at the end.

    Attributes:
        busy, sample_seconds, tokens: of all replicas, in the steady part.
        pool: as it was left.
    """

    scenario: Scenario
    steps: list[Step]
    busy: float
    sample_seconds: float
    generated: int
    pool: SamplePool

    @property
    def steady(self) -> list[Step]:
        return self.steps[self.scenario.warmup :]

    @property
    def seconds(self) -> float:
        """Of the steady part."""
        return self.steady[-1].end - self.steady[0].start

    @property
    def step_seconds(self) -> float:
        return self.seconds / len(self.steady)

    @property
    def tokens_per_second(self) -> float:
        tokens = sum(step.tokens for step in self.steady)
        return tokens / self.seconds if self.seconds else math.inf

    @property
    def sync_fraction(self) -> float:
        return self._share(sum(step.synced for step in self.steady))

    @property
    def rollout_idle(self) -> float:
        """Share of the replicas' time in which they neither generate nor take part in a sync (colocated: or train)."""
        used = self.busy / self.scenario.replicas + sum(step.synced for step in self.steady)
        if not self.scenario.rollout_ranks:
            used += sum(step.trained for step in self.steady)
        return max(0.0, self._share(self.seconds - used))

    @property
    def train_idle(self) -> float:
        """Share of the training ranks' time in which they wait; colocated ranks wait as replicas."""
        if not self.scenario.rollout_ranks:
            return self.rollout_idle
        return self._share(sum(step.waited for step in self.steady))

    def _share(self, seconds: float) -> float:
        """Of the steady part; 0 where that took no time, as can be where nothing costs anything."""
        return seconds / self.seconds if self.seconds else 0.0

    @property
    def slots_used(self) -> float:
        """Mean share of the slots that are in use while a replica works."""
        return self.sample_seconds / (self.busy * self.scenario.slots) if self.busy else 0.0

    @property
    def response_length(self) -> float:
        """Mean over the samples trained on."""
        samples = len(self.steady) * self.scenario.prompts * self.scenario.samples
        return sum(step.response_tokens for step in self.steady) / samples

    @property
    def lag_max(self) -> float:
        return max(step.metrics["lag/max"] for step in self.steady)

    def metric(self, name: str) -> float:
        """Mean of a pool's metric over the steady part."""
        return fmean(step.metrics[name] for step in self.steady)

    def as_dict(self) -> dict[str, float | str]:
        return {
            "name": self.scenario.name,
            "seconds_per_step": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "idle_fraction_rollout": self.rollout_idle,
            "idle_fraction_train": self.train_idle,
            "slots_used": self.slots_used,
            "resync_fraction": self.sync_fraction,
            "lag_mean": self.metric("lag/mean"),
            "lag_max": self.lag_max,
            "response_length": self.response_length,
            "recycled_samples": self.metric("rollout/recycled_samples"),
            "dropped_groups": float(self.pool.dropped),
            "replaced_groups": float(self.pool.replaced),
        }
