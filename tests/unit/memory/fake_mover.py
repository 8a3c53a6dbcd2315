"""Movers that move nothing and record what they were told."""

from __future__ import annotations

from hybridengine.memory.residency import OWNERS, State


class FakeMover:
    """Two halves, each in one place at a time; the next move fails between them when ``fail`` is set."""

    def __init__(self, owner: str, log: list[str]) -> None:
        self.owner, self.log, self.fail = owner, log, False
        self.halves = [State.DEVICE, State.DEVICE]

    def _move(self, to: State) -> None:
        self.log.append(f"{self.owner} {to.value}")
        for half in (0, 1):
            assert to is not State.HOST or self.halves[half] is not State.DROPPED, "bytes out of nothing"
            if half and self.fail:
                self.fail = False
                raise MemoryError(self.owner)
            self.halves[half] = to

    def offload(self) -> None:
        self._move(State.HOST)

    def onload(self) -> None:
        self._move(State.DEVICE)

    def drop(self) -> None:
        self._move(State.DROPPED)

    def nbytes(self) -> int:
        return 100


def fakes(owners: tuple[str, ...] = OWNERS) -> tuple[dict[str, FakeMover], list[str]]:
    """A mover for each owner, and the log that they share."""
    log: list[str] = []
    return {owner: FakeMover(owner, log) for owner in owners}, log
