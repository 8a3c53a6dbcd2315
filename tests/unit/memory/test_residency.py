"""Residency: legal moves only, the phase sequence's order, and recovery from moves that fail half-way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.memory import residency as module
from hybridengine.memory.residency import (
    GRADS,
    KV_CACHE,
    OPTIMIZE,
    OPTIMIZER,
    OWNERS,
    ROLLOUT,
    ROLLOUT_WEIGHTS,
    STATES,
    SYNC,
    TRAIN,
    TRAINER_PARAMS,
    TRANSITIONS,
    IllegalMoveError,
    Phase,
    Residency,
    State,
)
from tests.unit.memory.fake_mover import FakeMover, fakes

PHASES = {phase.name: phase for phase in vars(module).values() if isinstance(phase, Phase)}

# -- single moves ------------------------------------------------------------------------------------------------


def reach(owner: str, state: State) -> Residency:
    residency = Residency(fakes((owner,))[0])
    if state is not State.DEVICE:
        residency.move(owner, state)
    return residency


CASES = [(o, a, b) for o in OWNERS for a, b in itertools.product(State, State) if a in STATES[o]]


@pytest.mark.parametrize(("owner", "at", "to"), CASES, ids=[f"{o}-{a.value}-{b.value}" for o, a, b in CASES])
def test_every_pair_of_states_is_a_move_or_an_error_that_names_it(owner: str, at: State, to: State) -> None:
    residency = reach(owner, at)
    if to is at or (to in STATES[owner] and to in TRANSITIONS[at]):
        residency.move(owner, to)
        assert residency[owner] is to
    else:
        with pytest.raises(IllegalMoveError, match=f"{owner} can't go from {at.value} to {to.value}"):
            residency.move(owner, to)
        assert residency[owner] is at


def test_being_there_already_is_no_work() -> None:
    movers, log = fakes((OPTIMIZER,))
    residency = Residency(movers)
    for state in (State.DEVICE, State.HOST, State.HOST, State.DEVICE, State.DEVICE):
        residency.move(OPTIMIZER, state)
    assert log == ["optimizer host", "optimizer device"]


def test_unknown_owners_and_resting_states_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown memory owner 'adam'.*trainer_params"):
        Residency({"adam": FakeMover("adam", [])})
    with pytest.raises(ValueError, match="kv_cache can't rest in state 'host'.*device, dropped"):
        Residency({}, rest={KV_CACHE: State.HOST})
    with pytest.raises(ValueError, match="no memory owner 'critic' in this run"):
        Residency(fakes((OPTIMIZER,))[0]).move("critic", State.HOST)


def test_refilled_weights_only() -> None:
    """Dropped weights that came back are blank: nothing to offload, nothing to generate with."""
    residency = Residency(fakes((ROLLOUT_WEIGHTS, KV_CACHE))[0])
    residency.move(ROLLOUT_WEIGHTS, State.DROPPED)
    residency.move(ROLLOUT_WEIGHTS, State.DEVICE)
    with pytest.raises(IllegalMoveError, match="rollout_weights can't go from device to host.*nothing to keep"):
        residency.move(ROLLOUT_WEIGHTS, State.HOST)
    with pytest.raises(IllegalMoveError, match="needs a weight sync first"):
        residency.enter(ROLLOUT)
    residency.mark_filled(ROLLOUT_WEIGHTS)
    residency.enter(ROLLOUT)


# -- the sequence ------------------------------------------------------------------------------------------------

SMALL = (TRAINER_PARAMS, GRADS, OPTIMIZER, ROLLOUT_WEIGHTS, KV_CACHE)


def in_training() -> tuple[Residency, dict[str, FakeMover], list[str]]:
    movers, log = fakes(SMALL)
    residency = Residency(movers, after_leaving=lambda: log.append("empty cache"))
    residency.enter(OPTIMIZE)
    log.clear()
    return residency, movers, log


def transfer(residency: Residency) -> None:
    """A weight sync, as the mode switch has it: the rollout weights count again once all of them are written."""
    residency.enter(SYNC)
    residency.invalidate(ROLLOUT_WEIGHTS)
    residency.mark_filled(ROLLOUT_WEIGHTS)
    residency.enter(ROLLOUT)


def test_leaving_comes_before_coming_and_the_kv_cache_last() -> None:
    residency, _, log = in_training()
    transfer(residency)
    assert log == [
        "optimizer host",
        "grads dropped",
        "empty cache",
        "rollout_weights device",
        "trainer_params host",
        "empty cache",
        "kv_cache device",
    ]
    log.clear()
    residency.enter(TRAIN)
    assert log[:3] == ["kv_cache dropped", "rollout_weights dropped", "empty cache"]
    assert log[3:] == ["trainer_params device", "grads device"]
    residency.enter(OPTIMIZE)
    assert log[5:] == ["optimizer device"]


def test_what_starts_asleep_comes_when_it_is_needed_and_has_to_be_filled() -> None:
    """A rollout engine that was put to sleep before the trainer was built held no weights."""
    movers, log = fakes(SMALL)
    residency = Residency(movers, start={ROLLOUT_WEIGHTS: State.DROPPED, KV_CACHE: State.DROPPED})
    assert residency[ROLLOUT_WEIGHTS] is State.DROPPED and residency.is_blank(ROLLOUT_WEIGHTS)
    residency.enter(SYNC)
    assert log == ["optimizer host", "grads dropped", "rollout_weights device"]
    with pytest.raises(IllegalMoveError, match="needs a weight sync first"):
        residency.enter(ROLLOUT)
    residency.mark_filled(ROLLOUT_WEIGHTS)
    residency.enter(ROLLOUT)
    assert log[3:] == ["trainer_params host", "kv_cache device"]


def test_a_starting_place_must_be_one_that_the_owner_can_be_in() -> None:
    with pytest.raises(ValueError, match="kv_cache can't rest in state 'host'.*device, dropped"):
        Residency(fakes((KV_CACHE,))[0], start={KV_CACHE: State.HOST})


def test_contents_that_are_being_overwritten_are_no_contents() -> None:
    """Weights that never left the device are blank from the moment a sync begins to write them."""
    residency = Residency(fakes(SMALL)[0], rest={})
    residency.enter(ROLLOUT)
    residency.invalidate(ROLLOUT_WEIGHTS)
    with pytest.raises(IllegalMoveError, match="needs a weight sync first"):
        residency.enter(ROLLOUT)
    with pytest.raises(IllegalMoveError, match="nothing to keep"):
        residency.move(ROLLOUT_WEIGHTS, State.HOST)
    residency.mark_filled(ROLLOUT_WEIGHTS)
    residency.enter(ROLLOUT)
    residency.invalidate("critic")  # an owner that this run has not


@pytest.mark.parametrize("owner", SMALL)
def test_a_move_that_fails_half_way_can_be_retried_or_undone(owner: str) -> None:
    residency, movers, _ = in_training()
    transfer(residency)
    away = next(iter(TRANSITIONS[State.DEVICE] & STATES[owner]))
    if residency[owner] is not State.DEVICE:
        away = residency[owner]
    else:
        residency.move(owner, away)
    movers[owner].fail = True
    with pytest.raises(MemoryError):
        residency.move(owner, State.DEVICE)
    assert residency[owner] is away
    residency.move(owner, away)  # undone: the half that had come goes back
    assert movers[owner].halves == [away, away]
    residency.move(owner, State.DEVICE)
    assert movers[owner].halves == [State.DEVICE, State.DEVICE]


@pytest.mark.parametrize("start", [State.DEVICE, State.HOST])
def test_what_a_failed_drop_left_is_never_offloaded(start: State) -> None:
    movers, _ = fakes((GRADS,))
    residency = Residency(movers, rest={GRADS: State.HOST})
    residency.move(GRADS, start)
    movers[GRADS].fail = True
    with pytest.raises(MemoryError):
        residency.move(GRADS, State.DROPPED)
    with pytest.raises(IllegalMoveError, match="grads can't go from dropped to host"):
        residency.move(GRADS, State.HOST)
    residency.enter(SYNC)  # finishes the drop, although gradients would wait in host memory
    assert movers[GRADS].halves == [State.DROPPED, State.DROPPED]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*PHASES, "transfer", *OWNERS]), st.sampled_from(State), st.booleans())),
    st.booleans(),
)
def test_any_sequence_keeps_bytes_states_and_phases_true(moves: list[tuple[str, State, bool]], aliased: bool) -> None:
    """Random phases and single moves, legal or not, some failing half-way: whatever happened, the recorded state
    is where the bytes are, a settled phase holds exactly what it needs, and blank weights never reach a rollout."""
    movers, _ = fakes()
    residency = Residency(movers, aliased=aliased)
    for what, state, fails in moves:
        victim = movers[what if what in movers else OPTIMIZER]
        victim.fail = fails
        try:
            if what == "transfer":
                transfer(residency)
            elif what in PHASES:
                residency.enter(PHASES[what])
            else:
                residency.move(what, state)
        except MemoryError:
            continue  # retried by whatever comes next
        except IllegalMoveError as error:
            assert what == "rollout" or "can't go from" in str(error) and state.value in str(error)
            continue
        finally:
            victim.fail = False
        phase = {"transfer": ROLLOUT}.get(what, PHASES.get(what))
        if phase is not None:
            assert all(residency[owner] is State.DEVICE for owner in phase.needs)
            gone = [owner for owner in phase.leaves if not (aliased and owner == TRAINER_PARAMS)]
            assert all(residency[owner] is not State.DEVICE for owner in gone)
            assert phase is not ROLLOUT or not residency.is_blank(ROLLOUT_WEIGHTS)
            for owner in (*phase.needs, *gone):
                assert movers[owner].halves == [residency[owner]] * 2
    transfer(residency)
    residency.enter(SYNC)


def test_a_step_with_four_models_has_one_of_them_at_a_time() -> None:
    """Rollout, reward model, values, reference, critic, policy, sync: of the models beside the policy only the one that
    a phase needs is on the device, and the policy's own state is not there while another learns."""
    names = (*OWNERS,)
    residency = Residency(fakes(names)[0])
    beside, policy = {"reference", "critic", "reward_model"}, {TRAINER_PARAMS, OPTIMIZER, GRADS}
    wanted = {
        "rollout": set(), "reward_model": {"reward_model"}, "values": {"critic"}, "reference": {"reference"},
        "critic": {"critic"}, "train": set(), "optimize": set(), "sync": set(),
    }  # fmt: skip
    residency.enter(SYNC)
    residency.mark_filled(ROLLOUT_WEIGHTS)
    for _ in range(2):
        for phase, expected in wanted.items():
            residency.enter(PHASES[phase])
            if phase == "sync":
                residency.mark_filled(ROLLOUT_WEIGHTS)
            here = set(residency.sizes())
            assert here & beside == expected, phase
            assert not here & policy or phase not in ("rollout", "reward_model", "values", "reference", "critic"), phase
            assert (KV_CACHE in here) == (phase == "rollout")


@pytest.mark.parametrize(
    ("phase", "on_device"),
    [
        (module.SYNC, {TRAINER_PARAMS, ROLLOUT_WEIGHTS}),
        (module.ROLLOUT, {ROLLOUT_WEIGHTS, KV_CACHE, module.GRAPHS}),
        (module.SCORE_REWARD, {module.REWARD_MODEL}),
        (module.SCORE_VALUES, {module.CRITIC}),
        (module.SCORE_REFERENCE, {module.REFERENCE, TRAINER_PARAMS}),
        (module.SCORE, {TRAINER_PARAMS, GRADS, OPTIMIZER}),
        (module.TRAIN_CRITIC, {module.CRITIC}),
        (module.TRAIN, {TRAINER_PARAMS, GRADS, OPTIMIZER}),
        (module.OPTIMIZE, {TRAINER_PARAMS, GRADS, OPTIMIZER}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_who_is_on_the_device_in_a_phase_that_comes_first(phase: Phase, on_device: set[str]) -> None:
    """From the start state, everything on the device; scoring and training share weights, gradients and moments."""
    movers, _ = fakes(OWNERS)
    made = Residency(movers)
    made.enter(phase)
    assert {owner for owner in OWNERS if made[owner] is State.DEVICE} == on_device
