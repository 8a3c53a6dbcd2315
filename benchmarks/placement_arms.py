"""One arm of bench_placement: start the real program, watch its memory, read what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.schedule.recorder import read_windows
from hybridengine.simulate.calibrate import Run, read_run
from hybridengine.simulate.scenario import OFF_POLICY, SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
SKIP = 2  # steps at the start that are not counted: the first compiles, the second meets its leftovers
GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Arm:
    """By name: ``colocated-partial``, ``disaggregated-1+3-async`` (training + rollout ranks), ``colocated-sync-static``
    (no work stealing).

    Raises:
        ValueError: no such arm.
    """

    name: str

    def overrides(self, ranks: int) -> list[str]:
        placement, *rest = self.name.split("-")
        if placement == "colocated" and rest[:1] and rest[0] in SCHEDULES and rest[0] not in OFF_POLICY:
            if rest[1:] in ([], ["static"]):
                return [f"schedule={rest[0]}", f"rollout.work_stealing={str(not rest[1:]).lower()}"]
        elif placement == "disaggregated" and len(rest) == 2 and rest[1] in SCHEDULES:
            train, _, rollout = rest[0].partition("+")
            if train.isdigit() and rollout.isdigit() and int(train) + int(rollout) == ranks and int(train):
                return [f"schedule={rest[1]}", "placement=disaggregated", f"placement.rollout_ranks={rollout}"]
        raise ValueError(f"no arm {self.name!r} on {ranks} ranks; there are {', '.join(arms_of(ranks))}")


def arms_of(ranks: int) -> list[str]:
    """All that exist: colocated ones, and every split of the ranks with every schedule."""
    names = ["colocated-sync", "colocated-partial", *(["colocated-sync-static"] if ranks > 1 else [])]
    return names + [f"disaggregated-{ranks - r}+{r}-{schedule}" for r in range(1, ranks) for schedule in SCHEDULES]


@dataclass(slots=True, kw_only=True)
class Measured:
    """One run of one arm, its first SKIP steps left out.

    Attributes:
        run: as the simulator reads it: costs, lengths, step time.
        seconds_per_phase: means over steps, rank 0's top-level phases.
        idle: share of its time in which a pool waits, by pool (colocated: "all", waiting for the slowest replica).
        rollout_tokens_per_second: tokens generated over the seconds from a rollout's first engine step to its last.
        memory_gib: peak of the PSS of all ranks together.
        response_length: mean over the samples trained on.
        rewards: (seconds from the first counted step, reward) per step.
    """

    name: str
    run: Run
    seconds_per_phase: dict[str, float]
    idle: dict[str, float]
    resync_fraction: float
    rollout_tokens_per_second: float
    memory_gib: float
    response_length: float
    rewards: list[tuple[float, float]]
    dropped_groups: float
    load_average: float
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # rank 0's phases
    replicas: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def idle_fraction(self) -> float:
        """Over all ranks."""
        scenario = self.run.scenario
        if not scenario.rollout_ranks:
            return self.idle["all"]
        weighed = self.idle["train"] * scenario.train_ranks + self.idle["rollout"] * scenario.rollout_ranks
        return weighed / scenario.ranks


def start(arm: Arm, overrides: list[str], directory: Path, *, ranks: int, timeout: float) -> Measured:
    """Run the program to its end.

    Raises:
        SystemExit: it failed or took too long; the end of its log is shown.
    """
    load_average = os.getloadavg()[0]
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log.txt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "-m", "hybridengine.train", *overrides, *arm.overrides(ranks), f"output_dir={directory}", f"name={arm.name}",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        with MemoryWatch(process.pid) as memory:
            try:
                status: int | str = process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                status = f"no end after {timeout:.0f} s"
            finally:
                stop(process)
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nbench_placement: {arm.name} failed ({status}); log: {log}")
    return measure(arm, directory, memory_gib=memory.peak / 2**30, load_average=load_average)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher if it still runs; it ends its workers when asked politely."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


class MemoryWatch:
    """Peak of the proportional set size of a process's descendants, looked at every two seconds."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(2.0):
            self.peak = max(self.peak, sum(pss(pid) for pid in descendants(self._pid)))


def descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found[1:]


def pss(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


# -- reading -------------------------------------------------------------------------------------------------


def measure(arm: Arm, directory: Path, *, memory_gib: float, load_average: float) -> Measured:
    """From the run's own files."""
    run = read_run(directory, skip=SKIP)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > SKIP]
    phases: dict[str, float] = defaultdict(float)
    for record in steps:
        for name, seconds in record.items():
            if name.startswith("time/") and name != "time/step":
                phases[name.split("/")[1]] += seconds / len(steps)
    windows = [replica[SKIP:] for replica in read_windows(directory)]
    spans, replicas, first = read_trace(directory)
    rewards, clock = [], 0.0
    for record in steps:
        clock += record["time/step"]
        rewards.append((clock, record["reward"]))
    wall = sum(record["time/step"] for record in steps)
    sync = phases.get("sync", 0.0) / (wall / len(steps))
    return Measured(
        name=arm.name, run=run, seconds_per_phase=dict(sorted(phases.items(), key=lambda item: -item[1])),
        idle=idle_shares(run, windows, replicas, phases, since=first, wall=wall, sync=sync), resync_fraction=sync,
        rollout_tokens_per_second=rollout_rate(windows), memory_gib=memory_gib, rewards=rewards,
        response_length=sum(record["completions/mean_length"] for record in steps) / len(steps),
        dropped_groups=steps[-1]["staleness/dropped_groups"], load_average=load_average, spans=spans, replicas=replicas,
    )  # fmt: skip


def read_trace(directory: Path) -> tuple[list[tuple[str, float, float]], list[list[tuple[float, float]]], float]:
    """Rank 0's top-level phases, the replicas' stretches of work, and when the first counted step began."""
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    spans, begun = [], []
    replicas: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event["cat"] == "rollout":
            replicas[event["tid"]].append((start, end))
        elif event["tid"] == 0 and "/" not in event["args"]["path"]:
            spans.append((event["args"]["path"], start, end))
            if (event["args"]["step"] or 0) > SKIP:
                begun.append(start)
    return spans, [replicas[number] for number in sorted(replicas)], min(begun)


def idle_shares(
    run: Run,
    windows: list[list[dict[str, Any]]],
    replicas: list[list[tuple[float, float]]],
    phases: dict[str, float],
    *,
    since: float,
    wall: float,
    sync: float,
) -> dict[str, float]:
    """See Measured.idle."""
    count = len(windows)
    if not run.scenario.rollout_ranks:
        waited = 0.0
        for round_ in zip(*windows, strict=False):
            ends = [window["busy"][-1][1] for window in round_]
            waited += sum(max(ends) - end for end in ends) / count
        return {"all": waited / wall}
    busy = sum(max(0.0, min(end, since + wall) - max(start, since)) for found in replicas for start, end in found)
    steps = wall / run.seconds_per_step
    waits = (phases.get("rollout", 0.0) + phases.get("drain", 0.0)) * steps / wall
    return {"train": waits, "rollout": max(0.0, 1 - busy / count / wall - sync)}


def rollout_rate(windows: list[list[dict[str, Any]]]) -> float:
    """Tokens per second of rollouts, each from its first engine step to its last, over all replicas."""
    tokens = seconds = 0.0
    for round_ in zip(*windows, strict=False):
        seconds += max(w["busy"][-1][1] for w in round_) - min(w["busy"][0][0] for w in round_)
        tokens += sum(
            running * values[0] for w in round_ for kind in ("decode", "prefill") for running, values in w[kind].items()
        )
    return tokens / seconds


def wait_quiet(load: float, *, seconds: float) -> float:
    """Wait until the load average is below ``load``, ``seconds`` at most; what it is then."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > load and time.monotonic() < end:
        time.sleep(5)
    return os.getloadavg()[0]
