"""kill -9 at random moments of a run, again and again until it is through; its curve beside an undisturbed one."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.jobs import GRACE, Job, Variant, last_step, leftovers, numbers, overrides, running

#: Who is killed: one rank, everybody at once, or torchrun alone.
WHO = ("rank 0", "rank 1", "everybody", "torchrun")
_KILLED = re.compile(r"\[killed \d+: recorded (-?\d+)\]")
_RESUMED = re.compile(r"(?:resumed|is) at step (\d+)")  # "is" where nothing is left to do
#: The line of a step that was trained.
_TRAINED = re.compile(r"step +(\d+)/\d+  ")


@dataclass(slots=True)
class Outcome:
    """Of one or several chains.

    Attributes:
        kills: moments tried.
        resumed: of those after which a start went on where the job had been, losing nothing that was recorded.
        hangs: kills after which something of the job still ran when ``GRACE`` was over.
        lost_steps_max: the most steps that were recorded and had to be run again.
        curve_differences: steps whose numbers differ from the undisturbed run's, or that no record tells of.
        leftovers: names in /dev/shm and in the temporary directory that stayed.
        moments: who was killed, in which step.
        failed: ends of the output of jobs that ended by themselves, and not well.
    """

    kills: int = 0
    resumed: int = 0
    hangs: int = 0
    lost_steps_max: int = 0
    curve_differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.kills, self.resumed = self.kills + other.kills, self.resumed + other.resumed
        self.hangs, self.lost_steps_max = self.hangs + other.hangs, max(self.lost_steps_max, other.lost_steps_max)
        self.curve_differences += other.curve_differences
        self.leftovers += other.leftovers
        self.moments += other.moments
        self.failed += other.failed


def undisturbed(variant: Variant, model: Path, place: Path, steps: int) -> dict[int, tuple[float, ...]]:
    """The curve to hold a killed run against.

    Raises:
        RuntimeError: the job itself fails; with its output.
    """
    with running(overrides(variant, model, place / "whole", steps), place / "whole.log") as job:
        if job.process.wait(240) != 0:
            raise RuntimeError((place / "whole.log").read_text()[-6000:])
    return numbers(place / "whole")


def chain(variant: Variant, model: Path, place: Path, *, steps: int, kills: int, seed: int) -> Outcome:
    """One run of ``steps`` that is killed ``kills`` times and started again each time."""
    place.mkdir(parents=True, exist_ok=True)
    drawn, outcome = random.Random(seed), Outcome()
    expected = undisturbed(variant, model, place, steps)
    output, log = place / "killed", place / "killed.log"
    before, recorded = leftovers(), -1
    for turn in range(kills):
        with running(overrides(variant, model, output, steps), log) as job:
            who = drawn.choice(WHO)
            if not _wait(job, output, beyond=recorded, extra=drawn.uniform(0, 2.0), starting=drawn.random() < 0.15):
                if job.process.returncode != 0:
                    outcome.failed.append(_end(variant, log))
                break
            _kill(job, who)
            outcome.kills += 1
            recorded = last_step(output)
            outcome.moments.append(f"{variant.name}, {who}, after step {recorded}")
            if not job.gone(GRACE):
                outcome.hangs += 1
            recorded = max(recorded, last_step(output))  # ranks whose torchrun ended finish their step
        _note(log, turn, recorded)
    with running(overrides(variant, model, output, steps), log) as job:
        done = job.process.wait(240)
    if done != 0:
        outcome.failed.append(_end(variant, log))
    outcome.resumed, outcome.lost_steps_max = _went_on(log)
    _compare(outcome, variant, expected, numbers(output))
    outcome.leftovers += sorted(leftovers() - before)
    return outcome


def _wait(job: Job, output: Path, *, beyond: int, extra: float, starting: bool) -> bool:
    """Until a random moment of the start, or after the first step that this start records. False: it has ended."""
    if starting:
        time.sleep(extra * 3)
        return job.process.poll() is None
    deadline = time.monotonic() + 120
    while last_step(output) <= beyond and time.monotonic() < deadline:
        if job.process.poll() is not None:
            return False
        time.sleep(0.02)
    time.sleep(extra)
    return job.process.poll() is None


def _kill(job: Job, who: str) -> None:
    if who == "everybody":
        victims = job.pids()
    elif who == "torchrun":
        victims = [job.process.pid]
    else:
        victims = [job.rank(int(who[-1])) or job.process.pid]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end(variant: Variant, log: Path) -> str:
    return f"{variant.name}: {log.read_text(errors='replace')[-6000:]}"


def _note(log: Path, turn: int, recorded: int) -> None:
    """Write into the job's own output how far it had come; :func:`_went_on` reads it."""
    with log.open("a") as file:
        file.write(f"\n[killed {turn}: recorded {recorded}]\n")


def _went_on(log: Path) -> tuple[int, int]:
    """Kills after which a start went on where the job had been, and the most recorded steps that one had lost.

    A start is judged by what it says that it resumes from, or else by the first step that it trains: one that begins
    anew has lost everything, although its curve is the same.
    """
    resumed = most = recorded = waiting = 0  # waiting: kills that no start has followed that came as far as that
    for line in log.read_text(errors="replace").splitlines():
        if killed := _KILLED.match(line):
            recorded, waiting = max(recorded, int(killed[1])), waiting + 1
        elif waiting and (went_on := _RESUMED.search(line) or _TRAINED.match(line)):
            lost = recorded - (int(went_on[1]) - (went_on.re is _TRAINED))
            most = max(most, lost)
            resumed += waiting if lost <= 0 else 0
            waiting = 0
    return resumed, most


def _compare(
    outcome: Outcome, variant: Variant, expected: dict[int, tuple[float, ...]], found: dict[int, tuple[float, ...]]
) -> None:
    for step in expected:
        if step not in found:
            outcome.curve_differences.append(f"{variant.name}: no record of step {step}")
        elif variant.exact and found[step] != expected[step]:
            outcome.curve_differences.append(f"{variant.name}: step {step}: {found[step]}, not {expected[step]}")
    outcome.curve_differences += [f"{variant.name}: step {s} is recorded" for s in found if s not in expected]
