"""The arms of a comparison: placement, split, schedule and rollout tensor parallelism, as names and as overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridengine.simulate.scenario import OFF_POLICY, SCHEDULES

#: ``async`` that takes groups in order of admission (schedule.order=start).
IN_ORDER = "async_in_order"
ARM_SCHEDULES = (*SCHEDULES, IN_ORDER)
_NAME = re.compile(
    r"(?:colocated|disaggregated-(?P<train>\d+)\+(?P<rollout>\d+))-(?P<schedule>[a-z_]+)"
    r"(?P<static>-static)?(?:-tp(?P<tp>\d+))?"
)
#: ``sync.method`` of the user's that one of the placements does not have; arms of that placement choose themselves.
COLOCATED_ONLY, DISAGGREGATED_ONLY = ("collective", "gather"), ("broadcast", "delta", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run the job.

    >>> Arm.parse("disaggregated-2+6-async-tp2", ranks=8)
    Arm(ranks=8, rollout_ranks=6, schedule='async', tp=2, stealing=True)

    Attributes:
        ranks: of the whole job.
        rollout_ranks: of them in the rollout pool; 0: colocated.
        schedule: one of ARM_SCHEDULES.
        tp: rollout.tp.
        stealing: colocated: replicas take groups off a shared counter (rollout.work_stealing).

    Raises:
        ValueError: no such arm, naming what is wrong.
    """

    ranks: int
    rollout_ranks: int = 0
    schedule: str = "sync"
    tp: int = 1
    stealing: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in ARM_SCHEDULES:
            raise ValueError(f"{self.schedule}: no such schedule; there are {', '.join(ARM_SCHEDULES)}")
        if not self.rollout_ranks and self.schedule in (*OFF_POLICY, IN_ORDER):
            raise ValueError(f"colocated-{self.schedule}: ranks that do both can't generate while they train")
        if not 0 <= self.rollout_ranks < self.ranks:
            raise ValueError(f"{self.rollout_ranks} rollout ranks of {self.ranks}: none are left to train")
        if self.tp < 1 or self.generating % self.tp:
            raise ValueError(f"tp{self.tp}: must divide the {self.generating} ranks that generate")

    @classmethod
    def parse(cls, name: str, *, ranks: int) -> Arm:
        """From its name: ``colocated-partial``, ``disaggregated-1+3-async`` (training + rollout ranks);
        ``-static``: no work stealing; ``-tp2``: rollout.tp, 1 where nothing is said.

        Raises:
            ValueError: no such arm on that many ranks.
        """
        match = _NAME.fullmatch(name)
        listed = ", ".join(arm.name for arm in arms_of(ranks))
        if match is None:
            raise ValueError(f"no arm {name!r} on {ranks} ranks; there are {listed}")
        rollout = int(match["rollout"] or 0)
        if rollout and int(match["train"]) + rollout != ranks:
            raise ValueError(f"no arm {name!r} on {ranks} ranks; there are {listed}")
        try:
            return cls(
                ranks=ranks, rollout_ranks=rollout, schedule=match["schedule"], tp=int(match["tp"] or 1),
                stealing=match["static"] is None,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"no arm {name!r}: {error}; there are {listed}") from None

    @property
    def generating(self) -> int:
        """Ranks that generate."""
        return self.rollout_ranks or self.ranks

    @property
    def train_ranks(self) -> int:
        return self.ranks - self.rollout_ranks

    @property
    def placement(self) -> str:
        """``colocated``, or ``disaggregated-2+6``: training ranks first."""
        return f"disaggregated-{self.train_ranks}+{self.rollout_ranks}" if self.rollout_ranks else "colocated"

    @property
    def name(self) -> str:
        static = "" if self.stealing else "-static"
        return f"{self.placement}-{self.schedule}{static}" + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def off_policy(self) -> bool:
        """Whether it trains on samples of earlier versions by design."""
        return self.schedule != "sync"

    def with_schedule(self, schedule: str) -> Arm:
        """The same ranks and tensor parallelism under another schedule."""
        return Arm(ranks=self.ranks, rollout_ranks=self.rollout_ranks, schedule=schedule, tp=self.tp)

    def overrides(self, *, method: str = "auto") -> list[str]:
        """What makes the user's job this arm, whatever groups or keys it has; the line to train with.

        Args:
            method: the user's sync.method; replaced by auto where this placement does not have it.
        """
        in_order = self.schedule == IN_ORDER
        found = [f"placement.name={'disaggregated' if self.rollout_ranks else 'colocated'}"]
        if self.rollout_ranks:
            found.append(f"placement.rollout_ranks={self.rollout_ranks}")
        found.append(f"schedule.name={'async' if in_order else self.schedule}")
        if self.schedule in ("async", IN_ORDER):
            found.append(f"schedule.order={'start' if in_order else 'completion'}")
        found.append(f"rollout.tp={self.tp}")
        if not self.rollout_ranks:
            found.append(f"rollout.work_stealing={str(self.stealing).lower()}")
        if method in (COLOCATED_ONLY if self.rollout_ranks else DISAGGREGATED_ONLY):
            found.append("sync.method=auto")
        return found


def arms_of(ranks: int, *, tps: Sequence[int] = (1,)) -> list[Arm]:
    """Every arm with these tensor-parallel sizes: colocated ones, and each split of the ranks with each schedule."""
    found = [*_colocated(ranks, tps)]
    for rollout in range(1, ranks):
        found += _split(ranks, rollout, tps)
    return found


def candidates(ranks: int, *, tp: int) -> list[Arm]:
    """The arms that are worth a run, the most telling ones first.

    Placement and schedule can only be told apart where each is varied alone. So with the user's own ``rollout.tp``, or
    the largest below it that fits, come first: both placements under ``sync``, the other schedules of both with half of
    the ranks in each pool, the other tensor-parallel sizes, then a quarter and three quarters of the ranks for
    rollouts.

    Args:
        ranks: of the job.
        tp: the user's rollout.tp.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    own = max((size for size in range(1, tp + 1) if ranks % size == 0), default=1)
    order: list[Arm] = [*_colocated(ranks, [own])]
    splits = [split for split in dict.fromkeys((ranks // 2, ranks // 4, 3 * ranks // 4)) if 0 < split < ranks]
    for split in splits:
        fits = max((size for size in range(1, own + 1) if split % size == 0), default=1)
        order += _split(ranks, split, [fits])
        if split == splits[0]:
            order += _colocated(ranks, [size for size in sizes if size != own])
            order += _split(ranks, split, [size for size in sizes if size != fits])
    return sorted(dict.fromkeys(order), key=lambda arm: _rank(arm, ranks, own))


def _rank(arm: Arm, ranks: int, own: int) -> int:
    """Smaller first; sorting keeps the order of those that are equal."""
    if arm.rollout_ranks not in (0, ranks // 2):
        return 3
    half = max((size for size in range(1, own + 1) if (ranks // 2) % size == 0), default=1)
    if arm.schedule == "sync" and arm.tp in (own, half):  # what placement alone brings, with equal replicas
        return 0
    return 1 if arm.tp == (half if arm.rollout_ranks else own) else 2


def _colocated(ranks: int, tps: Sequence[int]) -> Iterator[Arm]:
    for tp in tps:
        if ranks % tp == 0:
            for schedule in SCHEDULES:
                if schedule not in OFF_POLICY:
                    yield Arm(ranks=ranks, schedule=schedule, tp=tp)


def _split(ranks: int, rollout: int, tps: Sequence[int]) -> Iterator[Arm]:
    for tp in tps:
        if rollout % tp == 0:
            for schedule in ARM_SCHEDULES:
                yield Arm(ranks=ranks, rollout_ranks=rollout, schedule=schedule, tp=tp)
