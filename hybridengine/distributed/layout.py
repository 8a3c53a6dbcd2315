"""RolloutLayout: how the ranks that generate form replicas of one model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """``size`` ranks, ``tp`` neighbouring ones of which hold one model between them: a replica.

    >>> print(RolloutLayout(8, 2))
    8 ranks = 4 replicas × TP 2
    >>> RolloutLayout(8, 2).replica_of(5), RolloutLayout(8, 2).tp_rank_of(5), RolloutLayout(8, 2).leaders
    (2, 1, (0, 2, 4, 6))

    Raises:
        ValueError: ``tp`` does not divide ``size``.
    """

    size: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.size % self.tp:
            fits = [tp for tp in range(1, self.size + 1) if self.size % tp == 0]
            raise ValueError(f"rollout.tp={self.tp}: must divide the {self.size} ranks that generate, such as {fits}")

    @property
    def num_replicas(self) -> int:
        return self.size // self.tp

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each replica, which sends and receives for it."""
        return tuple(range(0, self.size, self.tp))

    def replica_of(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.tp

    def is_leader(self, rank: int) -> bool:
        return rank % self.tp == 0

    def __str__(self) -> str:
        return f"{self.size} ranks = {self.num_replicas} replicas × TP {self.tp}"
