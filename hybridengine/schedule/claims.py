"""Which replica serves which group: dealt while all have room, claimed from a shared counter afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class Claims:
    """Positions 0 .. total-1 of one rollout's list of groups, shared out among replicas.

    The first ``slots`` groups of every replica are dealt round the table; each further one goes to whoever has room
    next. When all groups fit at once, or there is one replica, nothing is communicated.

    Args:
        total: groups in the list.
        replica, replicas: this rank's replica, and how many there are.
        slots: groups that a replica works on at once.
        stealing: False deals everything.
        key: unique to this rollout in the job's store.
        group: ranks of this replica, whose first rank claims for all; None for a replica of one rank.
    """

    def __init__(
        self,
        total: int,
        *,
        replica: int,
        replicas: int,
        slots: int,
        stealing: bool = True,
        key: str = "",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        dealt = min(total, slots * replicas) if stealing and replicas > 1 else total
        self._total, self._replicas, self._key, self._group = total, replicas, key, group
        self._dealt = list(range(replica, dealt, replicas))
        self._shared_from = dealt
        self._complete = 0
        self._store = dist.distributed_c10d._get_default_store() if replicas > 1 else None

    def next(self) -> int | None:
        """The next position for this replica; None when none is left. All ranks of a replica call it alike."""
        if self._dealt:
            return self._dealt.pop(0)
        if self._shared_from >= self._total:
            return None
        position = self._shared_from + self._agreed(lambda: self._add("claimed", 1) - 1)
        if position >= self._total:
            self._shared_from = self._total  # nobody asks again
            return None
        return position

    def add_completed(self, count: int) -> int:
        """Report ``count`` more complete groups; how many are complete over all replicas."""
        self._complete += count
        if self._store is None:
            return self._complete
        return self._agreed(lambda: self._add("complete", count))

    def _add(self, name: str, count: int) -> int:
        assert self._store is not None
        return int(self._store.add(f"{self._key}/{name}", count))

    def _agreed(self, ask: Callable[[], int]) -> int:
        """What the replica's first rank sees, on all its ranks."""
        if self._group is None:
            return int(ask())
        answer = torch.tensor([ask() if dist.get_rank(self._group) == 0 else 0])
        dist.broadcast(answer, group=self._group, group_src=0)
        return int(answer)
