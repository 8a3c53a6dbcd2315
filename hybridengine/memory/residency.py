"""Residency: where each large holder of memory is, and how it may move.

A holder (an *owner*, such as the optimizer state) is on the device, in host memory, or dropped. The engines move bytes;
this module decides which move is legal and in which order, so that the peak of a step is its largest phase and
not the sum of them. It depends on no engine and no tensor: an owner is a name and a Mover.

    rollout ──▶ train ──▶ optimize ──▶ sync ──▶ rollout …

    enter(SCORE_VALUES, TRAIN_CRITIC)  everything else leaves; the critic comes, with gradients and optimizer
    enter(TRAIN)    KV cache, graphs, rollout weights, critic leave; training weights and gradients come
    enter(OPTIMIZE) optimizer comes (prefetched during the last backward pass)
    enter(SYNC)     optimizer, gradients, reference and critic leave; rollout weights come     ← the peak: both
    (weight sync)   fills the rollout weights                                                     weights are here
    enter(ROLLOUT)  training weights leave, unless the rollout runs on them; KV cache and graphs come

Owners leave before others come. The KV cache comes last, when the memory that is left for it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hybridengine.platform.base import Mover

TRAINER_PARAMS, GRADS, OPTIMIZER = "trainer_params", "grads", "optimizer"
REFERENCE, CRITIC, REWARD_MODEL = "reference", "critic", "reward_model"
ROLLOUT_WEIGHTS, KV_CACHE, GRAPHS = "rollout_weights", "kv_cache", "graphs"


class State(Enum):
    """Where an owner's bytes are. After DROPPED an owner gets its memory back, but not its contents."""

    DEVICE = "device"
    HOST = "host"
    DROPPED = "dropped"


#: The states each owner can be in. What cannot be rebuilt is never dropped; caches of old weights and captured
#: graphs have no use in host memory.
STATES: dict[str, frozenset[State]] = {
    TRAINER_PARAMS: frozenset({State.DEVICE, State.HOST}),
    GRADS: frozenset({State.DEVICE, State.HOST, State.DROPPED}),
    OPTIMIZER: frozenset({State.DEVICE, State.HOST}),
    REFERENCE: frozenset({State.DEVICE, State.HOST}),
    CRITIC: frozenset({State.DEVICE, State.HOST}),
    REWARD_MODEL: frozenset({State.DEVICE, State.HOST}),
    ROLLOUT_WEIGHTS: frozenset({State.DEVICE, State.HOST, State.DROPPED}),
    KV_CACHE: frozenset({State.DEVICE, State.DROPPED}),
    GRAPHS: frozenset({State.DEVICE, State.DROPPED}),
}
OWNERS = tuple(STATES)

#: Owners that somebody else must fill after a drop before they are any use. Gradients, caches and graphs are filled
#: by the phase that needs them.
NEED_FILLING = frozenset({ROLLOUT_WEIGHTS})

#: From each state, where a single move can go. Dropped bytes cannot appear in host memory.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.DEVICE: frozenset({State.HOST, State.DROPPED}),
    State.HOST: frozenset({State.DEVICE, State.DROPPED}),
    State.DROPPED: frozenset({State.DEVICE}),
}


class IllegalMoveError(RuntimeError):
    """A move that would lose, duplicate or misuse memory; the message names the owner and both states."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Owners that a phase needs on the device, and owners that leave before those come; both in order."""

    name: str
    leaves: tuple[str, ...]
    needs: tuple[str, ...]


SYNC = Phase(
    "sync",
    leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, KV_CACHE, GRAPHS),
    needs=(TRAINER_PARAMS, ROLLOUT_WEIGHTS),
)
ROLLOUT = Phase(
    "rollout",
    leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, TRAINER_PARAMS),
    needs=(ROLLOUT_WEIGHTS, KV_CACHE, GRAPHS),
)
SCORE = Phase(
    "score", leaves=(KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, REFERENCE, CRITIC, REWARD_MODEL), needs=(TRAINER_PARAMS,)
)
SCORE_REFERENCE = Phase(
    "reference", leaves=(KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, OPTIMIZER, GRADS, CRITIC, REWARD_MODEL), needs=(REFERENCE,)
)
#: While another model than the policy has the device.
_BESIDE = (KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, OPTIMIZER, GRADS, TRAINER_PARAMS, REFERENCE)
SCORE_REWARD = Phase("reward_model", leaves=(*_BESIDE, CRITIC), needs=(REWARD_MODEL,))
SCORE_VALUES = Phase("values", leaves=(*_BESIDE, REWARD_MODEL), needs=(CRITIC,))
TRAIN_CRITIC = Phase("critic", leaves=SCORE_VALUES.leaves, needs=(CRITIC,))
TRAIN = Phase(
    "train",
    leaves=(KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, REFERENCE, CRITIC, REWARD_MODEL),
    needs=(TRAINER_PARAMS, GRADS),
)
OPTIMIZE = Phase("optimize", leaves=TRAIN.leaves, needs=(TRAINER_PARAMS, GRADS, OPTIMIZER))

#: Where owners wait while a phase does not need them. The default is deep sleep.
DEEP_SLEEP: dict[str, State] = {
    TRAINER_PARAMS: State.HOST,
    GRADS: State.DROPPED,
    OPTIMIZER: State.HOST,
    REFERENCE: State.HOST,
    CRITIC: State.HOST,
    REWARD_MODEL: State.HOST,
    ROLLOUT_WEIGHTS: State.DROPPED,
    KV_CACHE: State.DROPPED,
    GRAPHS: State.DROPPED,
}


class Residency:
    """State of every owner of one rank, moved along legal transitions only.

    Args:
        movers: owner name -> what moves it. Owners that a run does not have are simply absent; phases skip them.
        rest: where an owner waits while it is not needed; ``State.DEVICE`` means it stays. Absent owners stay.
        start: where owners are to begin with, those that are not on the device. What has to be filled after a drop
            and starts out dropped holds nothing.
        aliased: the rollout runs on the trainer's own memory, so the training weights may not leave while the
            rollout weights are on the device.
        after_leaving: called when a phase has sent something away and before anything comes: the place to hand
            cached blocks back to the driver, whose memory is what the other engine allocates from.

    Raises:
        ValueError: an unknown owner, or a resting state the owner cannot be in.
    """

    def __init__(
        self,
        movers: Mapping[str, Mover],
        *,
        rest: Mapping[str, State] = DEEP_SLEEP,
        start: Mapping[str, State] | None = None,
        aliased: bool = False,
        after_leaving: Callable[[], None] | None = None,
    ) -> None:
        start = start or {}
        for owner in (*movers, *rest, *start):
            if owner not in STATES:
                raise ValueError(f"unknown memory owner {owner!r}; must be one of {', '.join(OWNERS)}")
        for owner, state in (*rest.items(), *start.items()):
            if state not in STATES[owner]:
                allowed = ", ".join(sorted(s.value for s in STATES[owner]))
                raise ValueError(f"{owner} can't rest in state {state.value!r}; it can be in {allowed}")
        self.movers, self.rest, self.aliased = dict(movers), dict(rest), aliased
        self.phase: str | None = None
        self._after_leaving = after_leaving
        self._state = {owner: start.get(owner, State.DEVICE) for owner in movers}
        self._unsettled: set[str] = set()  # a move failed half-way; the state named is the last settled one
        #: Dropped, and not filled since.
        self._blank = {owner for owner in NEED_FILLING if self._state.get(owner) is State.DROPPED}

    # -- questions ---------------------------------------------------------------------------------

    def __getitem__(self, owner: str) -> State:
        """Where an owner is. Raises ValueError for one this run does not have."""
        self._mover(owner)
        return self._state[owner]

    def is_blank(self, owner: str) -> bool:
        """Whether the owner has memory but its contents were dropped and not filled since."""
        return owner in self._blank

    def sizes(self, *, on: State = State.DEVICE) -> dict[str, int]:
        """Bytes of every owner that is in state ``on``."""
        return {owner: self.movers[owner].nbytes() for owner, state in self._state.items() if state is on}

    # -- moves -------------------------------------------------------------------------------------

    def move(self, owner: str, to: State) -> None:
        """Bring one owner into a state; being there already is no work and no error.

        Raises:
            IllegalMoveError: the owner has no such state, there is no such transition, or the rollout runs on it.
            what the mover raised: the owner then counts as where it was, after a failed drop as dropped; any
                legal move from there, the failed one included, may be tried.
        """
        mover, at = self._mover(owner), self._state[owner]
        if to is at and owner not in self._unsettled:
            return
        self._check(owner, at, to)
        action = {State.DEVICE: mover.onload, State.HOST: mover.offload, State.DROPPED: mover.drop}[to]
        self._unsettled.add(owner)
        if to is State.DROPPED:
            # Contents can't be relied on from here on, even if the drop fails half-way: never offload them.
            self._state[owner] = State.DROPPED
            if owner in NEED_FILLING:
                self._blank.add(owner)
        action()
        self._unsettled.discard(owner)
        self._state[owner] = to

    def invalidate(self, owner: str) -> None:
        """The owner's contents are about to be overwritten: neither the old ones nor yet the new ones count."""
        if owner in self.movers:
            self._blank.add(owner)

    def mark_filled(self, owner: str) -> None:
        """The owner's contents are complete (a weight sync wrote them); nothing for an owner this run has not.

        Raises:
            IllegalMoveError: it is not on the device.
        """
        if owner not in self.movers:
            return
        if self[owner] is not State.DEVICE or owner in self._unsettled:
            raise IllegalMoveError(f"{owner} can't be filled: it is {self._where(owner)}, not on the device")
        self._blank.discard(owner)

    def prefetch(self, owner: str) -> None:
        """Start bringing an owner back; it counts as in host memory until a move to the device completes it.

        Does nothing for an owner that is on the device, absent, or whose mover cannot prefetch.
        """
        if self._state.get(owner) is State.HOST and owner not in self._unsettled:
            start = getattr(self.movers[owner], "prefetch", None)
            if start is not None:
                start()

    # -- phases ------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Move out what ``phase`` does not need, then bring in what it needs. Entering twice does nothing.

        A failure leaves every owner in a state it was in before or should be in after; entering again resumes.

        Raises:
            IllegalMoveError: a need of the phase is blank (dropped and not filled since), except where the
                phase itself fills it.
            what a mover raised.
        """
        leaving = [owner for owner in phase.leaves if self.leaves(owner)]
        for owner in leaving:
            # What is gone already stays gone, even where it would have waited in host memory.
            self.move(owner, State.DROPPED if self._state[owner] is State.DROPPED else self.rest[owner])
        if leaving and self._after_leaving is not None:
            self._after_leaving()
        for owner in phase.needs:
            if owner in self.movers:
                self.move(owner, State.DEVICE)
        self._check_contents(phase)
        self.phase = phase.name

    def ready(self, phase: Phase) -> bool:
        """Whether entering ``phase`` would move nothing."""
        come = [owner for owner in phase.needs if owner in self.movers]
        settled = all(self._state[owner] is State.DEVICE and owner not in self._unsettled for owner in come)
        return settled and not any(self.leaves(owner) for owner in phase.leaves)

    # -- rules -------------------------------------------------------------------------------------

    def rests_elsewhere(self, owner: str) -> bool:
        """Whether the owner gives its place to phases that do not need it."""
        if owner not in self.movers or self.rest.get(owner, State.DEVICE) is State.DEVICE:
            return False
        return not (self.aliased and owner == TRAINER_PARAMS)

    def leaves(self, owner: str) -> bool:
        """Whether the owner is on the device and gives its place to a phase that does not need it."""
        if not self.rests_elsewhere(owner):
            return False
        return self._state[owner] is State.DEVICE or owner in self._unsettled

    def _check(self, owner: str, at: State, to: State) -> None:
        step = f"{owner} can't go from {at.value} to {to.value}"
        if to not in STATES[owner]:
            raise IllegalMoveError(f"{step}: {_why_never(owner, to)}")
        if to is not at and to not in TRANSITIONS[at]:
            raise IllegalMoveError(f"{step}: its bytes are gone; bring it to the device and fill it first")
        if to is State.HOST and owner in self._blank:
            raise IllegalMoveError(f"{step}: it was dropped and not filled since, there is nothing to keep")
        in_use = self._state.get(ROLLOUT_WEIGHTS) is State.DEVICE or ROLLOUT_WEIGHTS in self._unsettled
        if self.aliased and owner == TRAINER_PARAMS and to is not State.DEVICE and in_use:
            raise IllegalMoveError(f"{step}: rollout_weights (device) run on the same memory")

    def _check_contents(self, phase: Phase) -> None:
        if ROLLOUT_WEIGHTS in self._blank and phase is ROLLOUT:
            raise IllegalMoveError(
                "rollout_weights are on the device but were dropped and not filled since: "
                "a rollout needs a weight sync first"
            )

    def _mover(self, owner: str) -> Mover:
        if owner not in self.movers:
            raise ValueError(f"no memory owner {owner!r} in this run; it has {', '.join(self.movers) or 'none'}")
        return self.movers[owner]

    def _where(self, owner: str) -> str:
        return f"{self._state[owner].value}{' (a move failed)' if owner in self._unsettled else ''}"


def _why_never(owner: str, to: State) -> str:
    if to is State.DROPPED:
        return "nothing could rebuild it"
    return f"it can only be in {', '.join(sorted(state.value for state in STATES[owner]))}"
