"""The short form of ``make test-faults``: a few kills, a few hundred configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzz import fuzz, names_a_key
from tests.faults.jobs import VARIANTS
from tests.faults.kills import Outcome, _compare, _went_on, chain


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("variant", "seed"), [("sync", 3), ("one_step_off", 5)])
def test_killed_runs_go_on_as_if_nothing_had_been(small_model: Path, tmp_path: Path, variant: str, seed: int) -> None:
    found = chain(VARIANTS[variant], small_model, tmp_path, steps=24, kills=2, seed=seed)
    assert found.kills == found.resumed == 2
    assert (found.hangs, found.lost_steps_max, found.curve_differences, found.failed) == (0, 0, [], []), found.moments


def test_no_configuration_ends_in_a_traceback() -> None:
    found = fuzz(200, 1)
    assert found.failures == [] and found.tried == 200
    assert found.ran > 5 and found.refused > 100


def test_what_the_harness_counts(tmp_path: Path) -> None:
    """It sees a lost step, a hole in the curve and another number: a harness that sees nothing finds nothing."""
    log = tmp_path / "log"
    log.write_text(
        "[killed 0: recorded 7]\nresumed at step 5, policy version 5: 3 steps to go\n[killed 1: recorded 6]\n"
    )
    assert _went_on(log) == (0, 2)
    log.write_text("[killed 0: recorded -1]\n[killed 1: recorded 7]\nresumed at step 7, policy version 7\n")
    assert _went_on(log) == (2, 0)
    log.write_text("[killed 0: recorded 7]\nstep  1/24  reward 0.3\nstep  2/24  reward 0.3\n[killed 1: recorded 7]\n")
    assert _went_on(log) == (0, 7), (
        "a run that begins anew has lost all, and the last kill was not followed by anything"
    )
    log.write_text(
        "[killed 0: recorded 24]\nhybridengine: run/step_00000024 is at step 24 of 24, and steps=24: nothing\n"
    )
    assert _went_on(log) == (1, 0)
    log.write_text("[killed 0: recorded -1]\nstep  1/24  reward 0.3\n")
    assert _went_on(log) == (1, 0)
    outcome = Outcome()
    _compare(outcome, VARIANTS["sync"], {1: (0.5,), 2: (0.25,), 3: (0.1,)}, {1: (0.5,), 2: (0.2,), 4: (0.0,)})
    assert [text.partition(": ")[2][:16] for text in outcome.curve_differences] == [
        "step 2: (0.2,), ", "no record of ste", "step 4 is record",
    ]  # fmt: skip
    assert names_a_key("rollout.tp=0: must be above 0", ["rollout.tp=0"]) and not names_a_key("wrong", ["seed=x"])
