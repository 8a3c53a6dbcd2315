"""One hostile program of every kind; strict and degraded; what the doctor says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hostile_programs import HARMLESS, KINDS, Traps, control, one
from hybridengine.process_control import adopt_orphans, children
from hybridengine.rewards.code import code_reward, sandbox
from hybridengine.rewards.code.sandbox import SandboxUnavailableError, check_sandbox, missing_protections, try_sandbox
from hybridengine.rewards.signatures import TimeLimitError

STRICT_HERE = not missing_protections() and sandbox.landlock_abi() > 0
needs_strict = pytest.mark.skipif(not STRICT_HERE, reason="needs Landlock ABI 6 (Linux 6.12) and sandlock")
LIMIT = 0.4


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traps]:
    made = Traps(tmp_path_factory.mktemp("traps"))
    yield made
    made.close()


@needs_strict
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_program(kind: str, traps: Traps) -> None:
    """It scores 0, touches nothing, leaves no process, and what goes on for ever ends at the limit."""
    before = set(children(os.getpid()))
    hostile = one(kind, traps)
    try:
        score = code_reward(
            "", hostile.program, hostile.answer, metadata={}, test_seconds=LIMIT, program_seconds=LIMIT
        )  # fmt: skip
    except TimeLimitError as error:
        score = error.score
    assert score == 0.0
    assert traps.escapes() == []
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize("kind", HARMLESS)
def test_without_a_sandbox_it_would_succeed(kind: str, traps: Traps) -> None:
    """Otherwise the test above would prove nothing."""
    assert control(kind, traps)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 4)
    assert missing_protections() == [
        "FS_IOCTL_DEV (Linux 6.10)", "SIGNAL_SCOPE (Linux 6.12)", "ABSTRACT_UNIX_SOCKET_SCOPE (Linux 6.12)",
    ]  # fmt: skip
    with pytest.raises(SandboxUnavailableError, match=r"lacks FS_IOCTL_DEV .*sandbox=degraded goes without"):
        check_sandbox("strict")
    check_sandbox("degraded")
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    for mode in ("strict", "degraded"):
        with pytest.raises(SandboxUnavailableError, match="no Landlock"):
            check_sandbox(mode)
    with pytest.raises(ValueError, match=r"must be one of strict \| degraded"):
        check_sandbox("none")


def test_nothing_runs_where_nothing_can_be_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    answer = {"entry_point": "f", "tests": [{"args": [1], "expected": 1}]}
    with pytest.raises(SandboxUnavailableError):
        code_reward("", "def f(x):\n    return x\n", answer, metadata={}, sandbox="degraded")


@needs_strict
def test_a_program_is_tried_before_a_run() -> None:
    try_sandbox("strict")
    try_sandbox("degraded")


@needs_strict
def test_a_supervisor_that_is_killed_takes_its_program_along() -> None:
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        code_reward(
            "", "import time\ntime.sleep(600)\n", {"inputs": [""], "outputs": ["x"]}, metadata={}, test_seconds=600.0,
            program_seconds=600.0,
        )  # fmt: skip
        os._exit(0)
    from tests.rewards.test_service import alive, wait_until

    assert wait_until(lambda: children(pid))
    programs = children(pid)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert wait_until(lambda: not any(alive(program) for program in programs), 5.0)


def test_doctor_shows_the_sandbox() -> None:
    from hybridengine.tools.doctor import check_sandbox as check

    (finding,) = list(check())
    assert finding.what == "reward=code"
    if STRICT_HERE:
        assert finding.status == "ok" and "strict" in finding.detail
    else:
        assert finding.status == "warn" and finding.remedy


def test_readable_paths_hold_no_project() -> None:
    root = Path(__file__).resolve().parents[2]
    for path in sandbox.readable(False):
        assert not root.is_relative_to(path), path
