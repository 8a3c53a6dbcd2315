"""SamplePool: groups of samples from admission to the batch that trains on them. Bookkeeping only, for any schedule.

A group (one prompt's samples) is admitted, started, possibly interrupted and recycled, completed, and taken into a
batch. All numbers of groups:

    admitted = waiting + running + ready + consumed + dropped + replaced

    capacity      how many more may be admitted now
      sync, one_step_off, async    (staleness + step + 1) · batch − (consumed + ready) − (waiting + running)
                                   (AReaL, arXiv:2505.24298, eq. 3; staleness 0 and 1 for the first two)
      partial                      ⌈over_provision · batch⌉ − ready − (waiting + running)
                                   (APRIL, arXiv:2509.18521)

``step`` counts training steps that are done; a batch is consumed when it is taken. So while a batch is trained the
first rule lets ``staleness`` further ones be under way, and a group is trained at most ``staleness`` steps after the
policy it began with, as long as groups are taken in the order they were admitted; a group that others have overtaken
and that is older by then is dropped, and counted. The simulator runs the same object on made-up durations.

Dynamic sampling (DAPO, arXiv:2503.14476): a complete group without a signal, whose rewards are all equal, is replaced:
it leaves the pool, which makes room for another prompt, until a batch is full of groups that have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hybridengine.algorithms.advantages import Rewards
from hybridengine.algorithms.rollout_metrics import is_sound
from hybridengine.config import Config
from hybridengine.engines.rollout.streaming import empty_trajectory
from hybridengine.schedule.base import RolloutLostError
from hybridengine.types import Prompt, Trajectory


class NoSignalError(RolloutLostError):
    """Dynamic sampling has replaced as many groups as it is allowed to, and the batch is not full."""


@dataclass(slots=True)
class Group:
    """One prompt's samples.

    Attributes:
        prompt: ``prompt.index`` names the group, once per run.
        admitted_at: training steps done when it was admitted; its age counts from here, and its seeds use it.
        samples: finished or not.
        finished: which samples are.
    """

    prompt: Prompt
    admitted_at: int
    samples: list[Trajectory]
    finished: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = self.finished or [False] * len(self.samples)

    @property
    def index(self) -> int:
        return self.prompt.index

    @property
    def is_complete(self) -> bool:
        return all(self.finished)

    @property
    def is_started(self) -> bool:
        return any(sample.token_ids for sample in self.samples)

    def unfinished(self) -> list[Trajectory]:
        return [sample for sample, done in zip(self.samples, self.finished, strict=True) if not done]


def is_flat(group: Group) -> bool:
    """Whether all rewards of a complete group are equal; those of unsound samples don't count."""
    rewards = [float(sample.reward or 0.0) for sample in group.samples]
    return bool(Rewards.of(rewards, len(rewards), kept=[is_sound(sample) for sample in group.samples]).flat[0])


@dataclass(frozen=True, slots=True)
class Replacement:
    """Dynamic sampling.

    Attributes:
        max_groups: replaced for one batch at most.
        fails: what comes after that: NoSignalError, or groups without a signal as they come.
        is_flat: whether a complete group is without a signal.
    """

    max_groups: int
    fails: bool = False
    is_flat: Callable[[Group], bool] = is_flat


class SamplePool:
    """See the module's text.

    Args:
        batch: groups per training step.
        group_size: samples per group.
        staleness: training steps between admission and training at most; None: no bound (partial).
        over_provision: partial only: groups in flight per step, as a multiple of ``batch``.
        in_order: a batch is the oldest groups of all, complete or not, so that short answers don't overtake long ones.
        replacement: of groups without a signal; None: they are trained like any other.

    Attributes:
        step: training steps done.
        taken: batches taken: ``step``, or one more while the last one is trained.
        dropped: groups lost to their age so far.
        replaced: groups without a signal replaced so far.
    """

    def __init__(
        self,
        *,
        batch: int,
        group_size: int,
        staleness: int | None = 0,
        over_provision: float = 1.0,
        in_order: bool = False,
        replacement: Replacement | None = None,
    ) -> None:
        if batch < 1 or group_size < 1 or over_provision < 1 or (staleness is not None and staleness < 0):
            raise ValueError(
                f"batch={batch}, group_size={group_size}, over_provision={over_provision}, staleness={staleness}: "
                "must be at least 1, 1, 1 and 0"
            )
        self.batch, self.group_size = batch, group_size
        self.staleness, self.over_provision, self.in_order = staleness, over_provision, in_order
        self.replacement = replacement
        self.step = self.taken = self.dropped = self.replaced = 0
        self._flat_seen = 0  # complete groups without a signal since the last batch
        self._open: dict[int, Group] = {}  # waiting or running, in order of admission
        self._ready: list[Group] = []  # complete, in order of completion

    # -- questions ---------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Groups that are complete and not trained on yet."""
        return len(self._ready)

    @property
    def open(self) -> list[Group]:
        """Groups that are not complete: recycled ones first, then in order of admission."""
        return sorted(self._open.values(), key=lambda group: not group.is_started)

    def capacity(self, *, one_batch: bool = False) -> int:
        """Groups that may be admitted now, 0 or more; with ``one_batch`` never more than one batch is in flight."""
        in_flight = len(self._ready) + len(self._open)
        if one_batch:
            return min(self.capacity(), max(0, self.batch - in_flight))
        if self.staleness is None:
            return max(0, math.ceil(self.over_provision * self.batch) - in_flight)
        return max(0, (self.staleness + self.step + 1 - self.taken) * self.batch - in_flight)

    # -- life of a group ---------------------------------------------------------------------------

    def admit(self, prompts: Iterable[Prompt]) -> list[Group]:
        """New groups, empty.

        Raises:
            ValueError: a prompt index is in the pool already.
        """
        groups = []
        for prompt in prompts:
            if prompt.index in self._open or any(group.index == prompt.index for group in self._ready):
                raise ValueError(f"prompt {prompt.index} is in the pool already")
            group = Group(prompt, self.step, [empty_trajectory(prompt, k) for k in range(self.group_size)])
            self._open[prompt.index] = group
            groups.append(group)
        return groups

    def update(self, sample: Trajectory, *, finished: bool) -> bool:
        """Record a sample's new state; returns whether its group is complete now.

        Raises:
            ValueError: its group is not open (nothing finished is counted twice).
        """
        group = self._open.get(sample.prompt.index)
        if group is None or group.finished[sample.sample_index]:
            raise ValueError(f"prompt {sample.prompt.index}, sample {sample.sample_index} is not open in the pool")
        group.samples[sample.sample_index] = sample
        group.finished[sample.sample_index] = finished
        if group.is_complete:
            del self._open[group.index]
            if not self._replaces(group):
                self._ready.append(group)
        return group.is_complete

    def _replaces(self, group: Group) -> bool:
        if self.replacement is None or not self.replacement.is_flat(group):
            return False
        self._flat_seen += 1
        within = self._flat_seen <= self.replacement.max_groups
        self.replaced += within
        return within

    def take(self) -> tuple[list[Trajectory], dict[str, float]] | None:
        """The next batch and its metrics; None while there are too few groups.

        Groups come in order of admission among those that are complete (``in_order``: among all; None until the oldest
        are complete). Those beyond the staleness bound are dropped.

        Raises:
            NoSignalError: groups have been replaced as often as they may be.
        """
        if self.replacement is not None and self.replacement.fails and self._flat_seen > self.replacement.max_groups:
            seen, self._flat_seen = self._flat_seen, 0  # whoever resumes may try as often again
            raise NoSignalError(
                f"{seen} groups with equal rewards for one batch of {self.batch}: more than "
                "algorithm.dynamic_sampling.max_rounds allows; the data may be too hard or too easy by now. "
                "algorithm.dynamic_sampling.on_exhausted=fill trains with what there is"
            )
        if self.staleness is not None:
            young = [group for group in self._ready if self.step - group.admitted_at <= self.staleness]
            self.dropped += len(self._ready) - len(young)
            self._ready = young
        chosen = sorted(self._ready, key=lambda group: group.index)[: self.batch]
        if len(chosen) < self.batch or self._overtakes(chosen[-1]):
            return None
        indices = {group.index for group in chosen}
        self._ready = [group for group in self._ready if group.index not in indices]
        ages = [self.step - group.admitted_at for group in chosen]
        metrics = {
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": float(max(ages)),
            "staleness/dropped_groups": float(self.dropped),
            "rollout/ready_groups": float(len(self._ready)),
            "rollout/open_groups": float(len(self._open)),
            "rollout/recycled_samples": float(sum(mixed(sample) for group in chosen for sample in group.samples)),
        }
        if self.replacement is not None:
            metrics["dynamic_sampling/replaced_groups"] = float(min(self._flat_seen, self.replacement.max_groups))
            metrics["dynamic_sampling/flat_groups"] = float(sum(map(self.replacement.is_flat, chosen)))
            self._flat_seen = 0
        self.taken += 1
        return [sample for group in chosen for sample in group.samples], metrics

    def _overtakes(self, group: Group) -> bool:
        """Whether the order of admission counts and a group before this one is not complete."""
        return self.in_order and any(index < group.index for index in self._open)

    def mark_trained(self) -> None:
        """Mark the batch that was taken last as trained on."""
        self.step = self.taken

    # -- persistence -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain containers: finished groups and partial samples survive, nothing is generated twice.

        For a checkpoint, which is written when what was taken has been trained.
        """
        groups = [*self._ready, *self._open.values()]
        counts = {"dropped": self.dropped, "replaced": self.replaced, "flat_seen": self._flat_seen}
        return {"step": self.taken, **counts, "groups": [_dump(group) for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = self.taken = int(state["step"])
        self.dropped = int(state["dropped"])
        self.replaced, self._flat_seen = int(state.get("replaced", 0)), int(state.get("flat_seen", 0))
        groups = [_restore(values) for values in state["groups"]]
        self._ready = [group for group in groups if group.is_complete]
        self._open = {group.index: group for group in groups if not group.is_complete}


def make_pool(config: Config) -> SamplePool:
    """The pool of the schedule that ``config`` names."""
    schedule, dynamic = config.schedule, config.algorithm.dynamic_sampling
    replacement = Replacement(
        (dynamic.max_rounds - 1) * config.data.prompts_per_step, fails=dynamic.on_exhausted == "error"
    )
    staleness = {"sync": 0, "one_step_off": 1, "async": schedule.staleness, "partial": None}[schedule.name]
    return SamplePool(
        batch=config.data.prompts_per_step,
        group_size=config.rollout.samples_per_prompt,
        staleness=staleness,
        over_provision=schedule.over_provision if schedule.name == "partial" else 1.0,
        in_order=schedule.name == "async" and schedule.order == "start",
        replacement=replacement if dynamic.enable else None,
    )


def mixed(sample: Trajectory) -> bool:
    """Whether more than one policy version sampled it."""
    return bool(sample.versions) and sample.versions[0] != sample.versions[-1]


def in_order(groups: Sequence[Group], expected_length: dict[str, float]) -> list[Group]:
    """Recycled groups first, then those expected to be longest: what takes longest must not start last.

    Args:
        expected_length: mean response length by prompt text, as far as known; others count as average.
    """
    average = sum(expected_length.values()) / len(expected_length) if expected_length else 0.0
    return sorted(groups, key=lambda g: (not g.is_started, -expected_length.get(g.prompt.text, average), g.index))


_PROMPT = tuple(item.name for item in fields(Prompt))
_SAMPLE = tuple(item.name for item in fields(Trajectory) if item.name != "prompt")


def _dump(group: Group) -> dict[str, Any]:
    return {
        "prompt": {name: getattr(group.prompt, name) for name in _PROMPT},
        "admitted_at": group.admitted_at,
        "finished": list(group.finished),
        "samples": [{name: getattr(sample, name) for name in _SAMPLE} for sample in group.samples],
    }


def _restore(values: dict[str, Any]) -> Group:
    prompt = Prompt(**values["prompt"])
    samples = [Trajectory(prompt=prompt, **sample) for sample in values["samples"]]
    return Group(prompt, values["admitted_at"], samples, list(values["finished"]))
