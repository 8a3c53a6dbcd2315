"""Arms: names, overrides, which ones make sense."""

from __future__ import annotations

import pytest

from hybridengine.compare.arms import IN_ORDER, Arm, arms_of, candidates
from hybridengine.config.compose import build


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_name_is_read_back(ranks: int) -> None:
    names = [arm.name for arm in arms_of(ranks, tps=(1, 2, 4))]
    assert len(set(names)) == len(names)
    for name in names:
        assert Arm.parse(name, ranks=ranks).name == name


@pytest.mark.parametrize("arm", arms_of(2, tps=(1, 2)), ids=lambda arm: arm.name)
def test_every_arm_is_a_configuration(arm: Arm) -> None:
    config = build(["+experiment=quickstart", *arm.overrides()])
    assert config.placement.name == ("disaggregated" if arm.rollout_ranks else "colocated")
    assert config.schedule.name == ("async" if arm.schedule == IN_ORDER else arm.schedule)
    assert (config.schedule.order == "start") == (arm.schedule == IN_ORDER)
    assert config.rollout.tp == arm.tp
    if arm.rollout_ranks:
        assert config.placement.rollout_ranks == arm.rollout_ranks


def test_an_arm_replaces_what_the_job_says() -> None:
    """Given as groups, as keys of groups, or both."""
    job = [
        "+experiment=quickstart", "placement=disaggregated", "schedule=async", "schedule.name=partial",
        "schedule.order=start", "placement.name=disaggregated", "rollout.tp=1", "sync.method=delta",
    ]  # fmt: skip
    config = build([*job, *Arm.parse("colocated-sync-static-tp2", ranks=2).overrides(method="delta")])
    assert (config.placement.name, config.schedule.name, config.rollout.tp) == ("colocated", "sync", 2)
    assert config.rollout.work_stealing is False and config.sync.method == "auto"
    free = build([*job, "rollout.work_stealing=false", *Arm.parse("disaggregated-1+1-async", ranks=2).overrides()])
    assert (free.schedule.name, free.schedule.order) == ("async", "completion")
    assert build(
        [*job, "rollout.work_stealing=false", *Arm.parse("colocated-sync", ranks=2).overrides()]
    ).rollout.work_stealing


@pytest.mark.parametrize(
    ("name", "method", "kept"),
    [
        ("colocated-sync", "collective", True),
        ("colocated-sync", "broadcast", False),
        ("disaggregated-1+1-sync", "broadcast", True),
        ("disaggregated-1+1-sync", "gather", False),
        ("disaggregated-1+1-sync", "pull", True),
    ],
)
def test_the_users_transfer_stays_where_the_placement_has_it(name: str, method: str, kept: bool) -> None:
    assert ("sync.method=auto" not in Arm.parse(name, ranks=2).overrides(method=method)) == kept


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("colocated-async", "can't generate while they train"),
        ("disaggregated-2+1-sync", "no arm 'disaggregated-2\\+1-sync' on 2 ranks"),
        ("disaggregated-0+2-sync", "none are left to train"),
        ("colocated-sync-tp3", "must divide the 2 ranks that generate"),
        ("disaggregated-1+1-sync-tp2", "must divide the 1 ranks that generate"),
        ("colocated-hurried", "hurried: no such schedule"),
        ("sync", "no arm 'sync' on 2 ranks"),
        ("colocated-sync-x", "no arm"),
    ],
)
def test_no_such_arm(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*there are colocated-sync, .*disaggregated-1\\+1-async"):
        Arm.parse(name, ranks=2)


def test_candidates_tell_placement_and_schedule_apart() -> None:
    """The first three vary placement alone, with replicas of one size; then schedules; then sizes; then splits."""
    names = [arm.name for arm in candidates(8, tp=2)]
    assert names[:2] == ["colocated-sync-tp2", "disaggregated-4+4-sync-tp2"]
    assert names[2:7] == [
        "colocated-partial-tp2", "disaggregated-4+4-partial-tp2", "disaggregated-4+4-one_step_off-tp2",
        "disaggregated-4+4-async-tp2", "disaggregated-4+4-async_in_order-tp2",
    ]  # fmt: skip
    assert {"colocated-sync-tp8", "disaggregated-6+2-sync-tp2", "disaggregated-2+6-async-tp2"} <= set(names[7:])
    assert len(names) == len(set(names))


def test_candidates_where_the_users_replica_does_not_fit_half_of_the_ranks() -> None:
    """rollout.tp=2 on 2 ranks: the pools have replicas of one rank, so colocated runs with those as well, early."""
    names = [arm.name for arm in candidates(2, tp=2)]
    assert names[:3] == ["colocated-sync-tp2", "disaggregated-1+1-sync", "colocated-sync"]
    assert len(names) == 9 and [arm.name for arm in candidates(1, tp=1)] == ["colocated-sync", "colocated-partial"]
