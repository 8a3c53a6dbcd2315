"""Colocated or disaggregated, and under which schedule: ``hybridengine compare`` on a long-tailed workload.

    make bench-placement                                                    # all arms on 2 ranks, two rounds
    .venv/bin/python -m benchmarks.bench_placement --quick                  # four arms, one round, few steps
    .venv/bin/python -m benchmarks.bench_placement --ranks 4 --arms colocated-sync disaggregated-2+2-async
    .venv/bin/python -m benchmarks.bench_placement --lengths embedded       # three-token answers of the embedded model

The default workload is long-tailed, see placement_workload.py. Beside what the command reports, on the same runs:

- partial, stealing rollout throughput (tokens over first to last engine step) against sync and against a static split,
                    the latter also ("stealing_speedup") with twice the samples for a quarter of the slots;
                    "simulated": the same ratio with one set of costs, by replicas: two cores can't run more than two
- broadcast         sync.method=broadcast against a broadcast of every parameter in full, see placement_broadcast.py

Quote ratios: seconds belong to the machine. An interrupted benchmark goes on in --out. Last line: a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import placement_broadcast as broadcast
from benchmarks.placement_workload import make_model, write_prompts
from hybridengine.compare import gantt
from hybridengine.compare.arms import Arm, arms_of
from hybridengine.compare.measured import Measured
from hybridengine.compare.page import write_page
from hybridengine.compare.plan import Plan, Settings
from hybridengine.compare.result import make_report, notes, phase_table, sentence, table
from hybridengine.compare.run import Comparison, Runs
from hybridengine.compare.watch import wait_quiet
from hybridengine.report.summary import commit, versions
from hybridengine.simulate.schedules import simulate

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 2  # steps at the start that are not counted: the first compiles, the second meets its leftovers
QUICK = ("colocated-sync", "colocated-partial", "disaggregated-{}+1-sync", "disaggregated-{}+1-async")
STEALING = ("colocated-sync", "colocated-sync-static")  # with and without
#: Options of a workload in which samples queue for slots; with slots for most of them there is little to steal.
CROWDED = {"samples": 8, "slots": 4}
REPLICAS = (2, 4, 8)  # for which the gains of partial and of work stealing are simulated
SIMULATED_STEPS = 60  # of those


def main() -> int:
    options = parse()
    console = Console(stderr=True, highlight=False, width=170)
    job = workload(options)
    runs = run_arms(options, options.arms, job, options.out / "compare", console)
    crowded = Runs()
    if set(STEALING) <= set(options.arms):
        few = argparse.Namespace(**vars(options) | CROWDED)
        console.print(f"work stealing with {few.samples} samples per prompt and {few.slots} slots per replica")
        crowded = run_arms(few, STEALING, workload(few), options.out / "crowded", console)
    arms = {name: Arm.parse(name, ranks=options.ranks) for name in runs.rounds}
    report = make_report(arms, runs.rounds, failed=runs.failed, conditions=conditions(options, runs))
    found = report.as_dict() | {"benchmark": "placement"} | comparisons(runs.rounds, crowded.rounds)
    found |= measure_broadcast(options)
    console.print(table(report))
    console.print(phase_table(report))
    for line in [*notes(report), sentence(report)]:
        console.print(line, markup=False, soft_wrap=True)
    write_page(options.out / "compare.html", report, job=" ".join(job))
    gantt.write_png(options.out / "gantt.png", report.last)
    for measured in report.last:
        gantt.write_png(options.out / f"gantt-{measured.name}.png", [measured])
    console.print(f"who works when: {options.out / 'gantt.png'}")
    print(json.dumps(found))
    return 0


def run_arms(options: argparse.Namespace, names: Sequence[str], job: list[str], out: Path, console: Console) -> Runs:
    """Every arm once per round, interleaved."""
    settings = Settings(
        job=tuple(job), ranks=options.ranks, steps=options.steps - WARMUP, warmup=WARMUP, rounds=options.rounds,
        minutes=options.minutes, arms=tuple(names), out=out,
    )  # fmt: skip
    plan = Plan(arms=[Arm.parse(name, ranks=options.ranks) for name in names])

    def quiet() -> None:
        wait_quiet(options.quiet, seconds=options.patience)

    return Comparison(settings, plan, console, before=quiet).run()


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks of every arm")
    add("--arms", nargs="+", help="default: all; on 2 ranks " + ", ".join(names_of(2)))
    add("--rounds", type=int, default=2, help="times each arm is started")
    add("--quick", action="store_true", help="four arms, one round, 8 steps")
    add("--lengths", choices=("longtail", "embedded"), default="longtail", help="whose answers: see the module's text")
    add("--steps", type=int, default=16, help=f"of which the first {WARMUP} are not counted")
    add("--prompts", type=int, default=32, help="per step")
    add("--samples", type=int, default=4, help="per prompt")
    add("--slots", type=int, default=16, help="samples a replica runs at once")
    add("--max-tokens", type=int, default=384, help="longest answer (longtail)")
    add("--hidden", type=int, default=128, help="width of the long-tailed model")
    add("--layers", type=int, default=2, help="of the long-tailed model")
    add("--over-provision", type=float, default=1.5, help="partial")
    add("--staleness", type=int, default=4, help="async")
    add("--broadcast-model", choices=broadcast.MODELS, default="dense")
    add("--broadcast-rounds", type=int, default=5, help="0: leave the broadcast out")
    add("--quiet", type=float, default=0.5 * (os.cpu_count() or 1), help="load average to wait for before an arm")
    add("--patience", type=float, default=20.0, help="seconds to wait for it at most")
    add("--minutes", type=float, default=60.0, help="budget of the runs")
    add("--out", type=Path, default=ROOT / "outputs" / "bench_placement", help="runs and pictures")
    options = parser.parse_args(given)
    if options.quick:
        options.rounds, options.steps, options.broadcast_rounds = 1, min(options.steps, 8), 3
        options.arms = options.arms or [name.format(options.ranks - 1) for name in QUICK]
    if options.rounds < 1 or options.steps < WARMUP + 3:
        parser.error(f"--rounds {options.rounds} --steps {options.steps}: at least 1 and {WARMUP + 3}")
    options.arms = options.arms or names_of(options.ranks)
    try:
        for name in options.arms:
            Arm.parse(name, ranks=options.ranks)
    except ValueError as error:
        parser.error(str(error))
    return options


def names_of(ranks: int) -> list[str]:
    """Every arm with replicas of one rank; with and without work stealing."""
    names = [arm.name for arm in arms_of(ranks)]
    return [*names, STEALING[1]] if ranks > 1 else names


def workload(options: argparse.Namespace) -> list[str]:
    """Overrides that all arms share; makes the model and the prompts."""
    shared = [
        "rollout.tp=1", f"rollout.samples_per_prompt={options.samples}", f"rollout.max_num_seqs={options.slots}",
        "rollout.kv_cache_gib=0.125", f"data.prompts_per_step={options.prompts}",
        f"schedule.over_provision={options.over_provision}", f"schedule.staleness={options.staleness}",
        "train.max_tokens_per_micro_batch=8192",
    ]  # fmt: skip
    if options.lengths == "embedded":
        return ["+experiment=quickstart", "train.lr=3e-4", *shared]
    directory = options.out / f"longtail-{options.hidden}x{options.layers}"
    if not (directory / "train.jsonl").exists():
        make_model(directory, hidden=options.hidden, layers=options.layers)
        write_prompts(directory / "train.jsonl", size=100 * max(40, options.prompts))
    return [
        f"model.path={directory / 'model'}", f"model.tokenizer={directory / 'tokenizer'}", "data=local",
        f"data.train={directory / 'train.jsonl'}", "data.chat=false", "data.validation_size=0", "data.shuffle=false",
        f"reward.fn={ROOT / 'benchmarks' / 'placement_workload.py'}:low_words", "data.max_prompt_tokens=16",
        f"rollout.max_tokens={options.max_tokens}", "train.lr=1e-4", *shared,
    ]  # fmt: skip


# -- figures -------------------------------------------------------------------------------------------------

Rounds = dict[str, list[Measured]]


def comparisons(rounds: Rounds, crowded: Rounds) -> dict[str, Any]:
    """Ratios of rollout throughput, round by round, and what the simulator says of them.

    Args:
        crowded: the arms of STEALING where samples queue for slots.
    """
    found: dict[str, Any] = {}
    for key, arms, faster, slower in (
        ("partial_speedup", rounds, "colocated-partial", "colocated-sync"),
        ("stealing_speedup", crowded, *STEALING),
        ("stealing_speedup_uncrowded", rounds, *STEALING),
    ):
        found[key] = found[f"{key}_simulated"] = None
        if faster in arms and slower in arms:
            found[key] = statistics.median(
                a.rollout_tokens_per_second / b.rollout_tokens_per_second
                for a, b in zip(arms[faster], arms[slower], strict=False)
            )
            costs = arms["colocated-sync"][0]
            found[f"{key}_simulated"] = {
                replicas: simulated_rate(arms[faster][0], costs, replicas)
                / simulated_rate(arms[slower][0], costs, replicas)
                for replicas in REPLICAS
            }
    return found


def simulated_rate(measured: Measured, costs_of: Measured, replicas: int) -> float:
    """Tokens generated per second of rollouts, with the costs of ``costs_of`` and as many prompts per replica."""
    scenario = measured.run.scenario
    prompts = scenario.prompts * replicas // scenario.replicas
    scenario = scenario.with_(ranks=replicas * scenario.tp, prompts=prompts, steps=SIMULATED_STEPS, warmup=WARMUP)
    outcome = simulate(scenario, costs_of.run.costs)
    return outcome.generated / sum(step.waited for step in outcome.steady)


def measure_broadcast(options: argparse.Namespace) -> dict[str, Any]:
    """Of the benchmark's ranks, and of 2 + 2."""
    if not options.broadcast_rounds:
        return {}
    half = max(1, options.ranks // 2)
    case = broadcast.Case(model=options.broadcast_model, train=half, rollout=half, tp=half, dtype="float32")
    cases = [broadcast.Case(model=case.model, train=2, rollout=2, tp=2, dtype="float32"), case]
    found = [broadcast.summary(c, broadcast.measure(c, options.broadcast_rounds)) for c in dict.fromkeys(cases)]
    return {"broadcast": found, "broadcast_speedup": found[0]["broadcast_speedup"]}


def conditions(options: argparse.Namespace, runs: Runs) -> dict[str, Any]:
    lengths = next(iter(runs.rounds.values()))[0].run.scenario.lengths
    return {
        "workload": {
            "lengths": options.lengths, "measured": lengths.describe(), "prompts": options.prompts,
            "samples": options.samples, "slots": options.slots, "steps": options.steps, "rounds": options.rounds,
        },
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        **commit(),
        "versions": versions(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
