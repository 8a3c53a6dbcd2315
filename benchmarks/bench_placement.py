"""Colocated or disaggregated, and under which schedule: the same model, prompts, devices and tokens in every arm.

    make bench-placement                                                    # all arms on 2 ranks, two rounds
    .venv/bin/python -m benchmarks.bench_placement --quick                  # four arms, one round, few steps
    .venv/bin/python -m benchmarks.bench_placement --ranks 4 --arms colocated-sync disaggregated-2+2-async
    .venv/bin/python -m benchmarks.bench_placement --lengths embedded       # three-token answers of the embedded model

Every arm is the whole program (torchrun, FSDP2, vLLM) on its own. Arms take turns; from round to round their order
turns around. The default workload is long-tailed, see placement_workload.py. Written to --out: a picture of who works
when, of all arms and of each (gantt*.png), and every run's own files.

Reported beside the runs:
- simulator error   each arm, simulated with the costs measured in this very run (engine steps per batch size, training
                    per token, sync, ...): what is tested is who waits for whom. "from sync" predicts an arm from the
                    costs of the same placement's sync arm, which also needs a machine as quiet as it was then
- partial, stealing rollout throughput (tokens over first to last engine step) against sync and against a static split,
                    the latter also ("stealing_speedup") with twice the samples for a quarter of the slots;
                    "simulated": the same ratio with one set of costs, by replicas: two cores can't run more than two
- broadcast         sync.method=broadcast against a broadcast of every parameter in full, see placement_broadcast.py

Quote ratios: seconds belong to the machine. The last line is one JSON object.
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
from rich.table import Table

from benchmarks import placement_broadcast as broadcast
from benchmarks.placement_arms import ROOT, SKIP, Arm, Measured, arms_of, start, wait_quiet
from benchmarks.placement_workload import make_model, write_prompts
from hybridengine.report.summary import commit, versions
from hybridengine.simulate.schedules import simulate

QUICK = ("colocated-sync", "colocated-partial", "disaggregated-{}+1-sync", "disaggregated-{}+1-async")
STEALING = ("colocated-sync", "colocated-sync-static")  # with and without
#: Options of a workload in which samples queue for slots; with slots for most of them there is little to steal.
CROWDED = {"samples": 8, "slots": 4}
REPLICAS = (2, 4, 8)  # for which the gains of partial and of work stealing are simulated
SIMULATED_STEPS = 60  # of those
LAST_REWARDS = 3  # steps that a reward is the mean of
LENGTHS_DIFFER = 0.25  # of the arms' median: beyond it, an arm does other work than the rest


def main() -> int:
    options = parse()
    log = Console(stderr=True, highlight=False, width=170)
    rounds = run_arms(options, options.arms, workload(options), options.out, log)
    crowded: dict[str, list[Measured]] = {}
    if set(STEALING) <= set(options.arms):
        few = argparse.Namespace(**vars(options) | CROWDED)
        log.print(f"work stealing with {few.samples} samples per prompt and {few.slots} slots per replica")
        crowded = run_arms(options, STEALING, workload(few), options.out / "crowded", log)
    arms = [summary(name, found, rounds) for name, found in rounds.items()]
    report: dict[str, Any] = {"benchmark": "placement", "arms": arms, **comparisons(rounds, crowded)}
    case = broadcast.Case(
        model=options.broadcast_model, train=max(1, options.ranks // 2), rollout=max(1, options.ranks // 2),
        tp=max(1, options.ranks // 2), dtype="float32",
    )  # fmt: skip
    cases = [broadcast.Case(model=case.model, train=2, rollout=2, tp=2, dtype="float32"), case]
    report["broadcast"] = [
        broadcast.summary(c, broadcast.measure(c, options.broadcast_rounds)) for c in dict.fromkeys(cases)
    ]
    report["broadcast_speedup"] = report["broadcast"][0]["broadcast_speedup"]
    report |= conditions(options, rounds)
    log.print(table(arms))
    log.print(phase_table(arms))
    log.print(verdict(arms))
    draw(options.out, rounds, log)
    print(json.dumps(rounded(report)))
    return 0


def run_arms(
    options: argparse.Namespace, names: Sequence[str], overrides: list[str], out: Path, log: Console
) -> dict[str, list[Measured]]:
    """Every arm once per round."""
    rounds: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in list(rounds) if number % 2 == 0 else list(reversed(rounds)):
            wait_quiet(options.quiet, seconds=options.patience)
            directory = out / f"{name}-round{number}"
            found = start(Arm(name), overrides, directory, ranks=options.ranks, timeout=options.timeout)
            rounds[name].append(found)
            log.print(f"round {number + 1}/{options.rounds} {name}: {found.run.seconds_per_step:.2f} s per step, "
                      f"load {found.load_average:.1f} before")  # fmt: skip
    return rounds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks of every arm")
    add("--arms", nargs="+", help="default: all; on 2 ranks " + ", ".join(arms_of(2)))
    add("--rounds", type=int, default=2, help="times each arm is started")
    add("--quick", action="store_true", help="four arms, one round, 8 steps")
    add("--lengths", choices=("longtail", "embedded"), default="longtail", help="whose answers: see the module's text")
    add("--steps", type=int, default=16, help=f"of which the first {SKIP} are not counted")
    add("--prompts", type=int, default=32, help="per step")
    add("--samples", type=int, default=4, help="per prompt")
    add("--slots", type=int, default=16, help="samples a replica runs at once")
    add("--max-tokens", type=int, default=384, help="longest answer (longtail)")
    add("--hidden", type=int, default=128, help="width of the long-tailed model")
    add("--layers", type=int, default=2, help="of the long-tailed model")
    add("--over-provision", type=float, default=1.5, help="partial")
    add("--staleness", type=int, default=4, help="async")
    add("--broadcast-model", choices=broadcast.MODELS, default="dense")
    add("--broadcast-rounds", type=int, default=5)
    add("--quiet", type=float, default=0.5 * (os.cpu_count() or 1), help="load average to wait for before an arm")
    add("--patience", type=float, default=20.0, help="seconds to wait for it at most")
    add("--timeout", type=float, default=1200.0, help="seconds allowed to one start of one arm")
    add("--out", type=Path, default=ROOT / "outputs" / "bench_placement", help="runs and pictures")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.broadcast_rounds = 1, min(options.steps, 8), 3
        options.arms = options.arms or [name.format(options.ranks - 1) for name in QUICK]
    if options.rounds < 1 or options.steps < SKIP + 3:
        parser.error(f"--rounds {options.rounds} --steps {options.steps}: at least 1 and {SKIP + 3}")
    options.arms = options.arms or arms_of(options.ranks)
    try:
        for name in options.arms:
            Arm(name).overrides(options.ranks)
    except ValueError as error:
        parser.error(str(error))
    return options


def workload(options: argparse.Namespace) -> list[str]:
    """Overrides that all arms share; makes the model and the prompts."""
    shared = [
        "rollout.tp=1", f"rollout.samples_per_prompt={options.samples}", f"rollout.max_num_seqs={options.slots}",
        "rollout.kv_cache_gib=0.125", f"data.prompts_per_step={options.prompts}", f"steps={options.steps}",
        f"schedule.over_provision={options.over_provision}", f"schedule.staleness={options.staleness}",
        "train.max_tokens_per_micro_batch=8192", "validate_every=0", "logging.tensorboard=false",
        "logging.plot=false", "checkpoint.export=false", "checkpoint.resume=never",
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


def summary(name: str, found: Sequence[Measured], rounds: dict[str, list[Measured]]) -> dict[str, Any]:
    """Medians over rounds."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    phases = {
        phase: median([m.seconds_per_phase.get(phase, 0.0) for m in found]) for phase in found[0].seconds_per_phase
    }
    own, other = simulator_error(found), simulator_error_from_sync(name, rounds)
    return {
        "name": name,
        "tokens_per_second": median([m.run.tokens_per_second for m in found]),
        "seconds_per_step": median([m.run.seconds_per_step for m in found]),
        "seconds_per_phase": phases,
        "idle_fraction": median([m.idle_fraction for m in found]),
        "idle_fraction_per_pool": {pool: median([m.idle[pool] for m in found]) for pool in found[0].idle},
        "resync_fraction": median([m.resync_fraction for m in found]),
        "rollout_tokens_per_second": median([m.rollout_tokens_per_second for m in found]),
        "memory_gib": median([m.memory_gib for m in found]),
        "response_length": median([m.response_length for m in found]),
        "reward_last": median([reward_until(m, float("inf")) for m in found]),
        "reward_after_equal_time": median([reward_until(m, equal_time(rounds)) for m in found]),
        "dropped_groups": median([m.dropped_groups for m in found]),
        "simulator_error": own,
        "simulator_error_from_sync": other,
        "load_average_before": [m.load_average for m in found],
    }


def simulator_error(found: Sequence[Measured]) -> float:
    """Relative error of the step time, median over rounds: costs and lengths of the very run."""
    errors = []
    for measured in found:
        scenario = measured.run.scenario
        simulated = simulate(scenario, measured.run.costs).step_seconds
        errors.append(simulated / measured.run.seconds_per_step - 1)
    return statistics.median(errors)


def simulator_error_from_sync(name: str, rounds: dict[str, list[Measured]]) -> float | None:
    """The same with the costs of the placement's sync arm of the same round; None without one."""
    base = rounds.get(sync_of(name))
    if base is None or name == sync_of(name):
        return None
    return statistics.median(
        simulate(measured.run.scenario, sync.run.costs).step_seconds / measured.run.seconds_per_step - 1
        for measured, sync in zip(rounds[name], base, strict=True)
    )


def sync_of(name: str) -> str:
    parts = name.split("-")
    return "colocated-sync" if parts[0] == "colocated" else f"{parts[0]}-{parts[1]}-sync"


def equal_time(rounds: dict[str, list[Measured]]) -> float:
    """The shortest of all runs, seconds of counted steps."""
    return min(measured.rewards[-1][0] for found in rounds.values() for measured in found)


def reward_until(measured: Measured, seconds: float) -> float:
    """Mean of the last LAST_REWARDS steps that ended by then."""
    known = [reward for end, reward in measured.rewards if end <= seconds][-LAST_REWARDS:]
    return statistics.fmean(known) if known else float("nan")


def comparisons(rounds: dict[str, list[Measured]], crowded: dict[str, list[Measured]]) -> dict[str, Any]:
    """Ratios of rollout throughput, round by round, and the largest simulator errors.

    Args:
        crowded: the arms of STEALING where samples queue for slots.
    """
    own = [simulator_error(found) for found in rounds.values()]
    other = [error for name in rounds if (error := simulator_error_from_sync(name, rounds)) is not None]
    found: dict[str, Any] = {
        "simulator_error_max": max(abs(error) for error in own),
        "simulator_error_from_sync_max": max((abs(error) for error in other), default=None),
    }
    for key, arms, faster, slower in (
        ("partial_speedup", rounds, "colocated-partial", "colocated-sync"),
        ("stealing_speedup", crowded, *STEALING),
        ("stealing_speedup_uncrowded", rounds, *STEALING),
    ):
        found[key] = found[f"{key}_simulated"] = None
        if faster in arms and slower in arms:
            found[key] = statistics.median(
                a.rollout_tokens_per_second / b.rollout_tokens_per_second
                for a, b in zip(arms[faster], arms[slower], strict=True)
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
    scenario = scenario.with_(ranks=replicas * scenario.tp, prompts=prompts, steps=SIMULATED_STEPS, warmup=SKIP)
    outcome = simulate(scenario, costs_of.run.costs)
    return outcome.generated / sum(step.waited for step in outcome.steady)


# -- reporting -----------------------------------------------------------------------------------------------


def table(arms: Sequence[dict[str, Any]]) -> Table:
    found = Table(title="placements and schedules; medians over rounds, first steps left out", title_justify="left")
    heads = ("arm", "tokens/s", "", "s/step", "idle", "sync", "GiB", "response", "dropped", "reward", "at equal time",
             "simulated", "from sync")  # fmt: skip
    for head in heads:
        found.add_column(head, justify="left" if head in ("arm", "idle") else "right", no_wrap=head == "arm")
    for arm in arms:
        error = arm["simulator_error_from_sync"]
        found.add_row(
            arm["name"],
            f"{arm['tokens_per_second']:.0f}",
            f"{arm['tokens_per_second'] / arms[0]['tokens_per_second']:.2f}×",
            f"{arm['seconds_per_step']:.2f}",
            ", ".join(f"{pool} {share:.0%}" for pool, share in arm["idle_fraction_per_pool"].items()),
            f"{arm['resync_fraction']:.1%}",
            f"{arm['memory_gib']:.2f}",
            f"{arm['response_length']:.0f}",
            f"{arm['dropped_groups']:.0f}",
            f"{arm['reward_last']:.3f}",
            f"{arm['reward_after_equal_time']:.3f}",
            f"{arm['simulator_error']:+.1%}",
            "" if error is None else f"{error:+.1%}",
        )
    return found


def phase_table(arms: Sequence[dict[str, Any]]) -> Table:
    """Seconds per step of the phases that matter in some arm."""
    names = {
        phase for arm in arms for phase, seconds in arm["seconds_per_phase"].items()
        if seconds > 0.01 * arm["seconds_per_step"]
    }  # fmt: skip
    order = sorted(names, key=lambda name: -max(arm["seconds_per_phase"].get(name, 0.0) for arm in arms))
    found = Table(title="seconds per step, by phase of the training ranks", title_justify="left")
    for head in ("arm", *order):
        found.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for arm in arms:
        found.add_row(arm["name"], *(f"{arm['seconds_per_phase'].get(name, 0.0):.3f}" for name in order))
    return found


def verdict(arms: Sequence[dict[str, Any]]) -> str:
    """Which arm is fastest, and what the others do in the meantime."""
    best = max(arms, key=lambda arm: arm["tokens_per_second"])
    sentence = (
        f"{best['name']} is fastest: {best['tokens_per_second']:.0f} tokens/s, its ranks idle "
        f"{best['idle_fraction']:.0%} of the time and {best['resync_fraction']:.1%} of it goes into weight syncs"
    )
    others = [arm for arm in arms if arm is not best]
    if not others:
        return sentence + "."
    second = max(others, key=lambda arm: arm["tokens_per_second"])
    ratio = best["tokens_per_second"] / second["tokens_per_second"]
    sentence += f"; {ratio:.2f}× {second['name']}, which idles {second['idle_fraction']:.0%}"
    synchronous = {arm["name"]: arm for arm in arms if arm["name"].endswith("-sync")}
    placements = sorted(synchronous.values(), key=lambda arm: -arm["tokens_per_second"])
    if len(placements) > 1:
        effect = placements[0]["tokens_per_second"] / placements[-1]["tokens_per_second"]
        sentence += f". Of that, placement alone (sync): {placements[0]['name']} {effect:.2f}× {placements[-1]['name']}"
    base = synchronous.get(sync_of(best["name"]))
    if base is not None and base is not best:
        effect = best["tokens_per_second"] / base["tokens_per_second"]
        sentence += f"; schedule alone, in the winner's placement: {effect:.2f}× sync"
    sentence += "."
    lengths = {arm["name"]: arm["response_length"] for arm in arms}
    middle = statistics.median(lengths.values())
    odd = [f"{name} ({length:.0f})" for name, length in lengths.items() if abs(length / middle - 1) > LENGTHS_DIFFER]
    if odd:
        sentence += (
            f" Not the same work: response lengths are {middle:.0f} in the middle and differ by more than "
            f"{LENGTHS_DIFFER:.0%} in {', '.join(odd)}; compare those arms' tokens/s with care."
        )
    return sentence


def draw(out: Path, rounds: dict[str, list[Measured]], log: Console) -> None:
    from benchmarks import placement_gantt

    last = [found[-1] for found in rounds.values()]
    placement_gantt.draw(out / "gantt.png", last)
    for measured in last:
        placement_gantt.draw(out / f"gantt-{measured.name}.png", [measured])
    log.print(f"who works when: {out / 'gantt.png'}")


def conditions(options: argparse.Namespace, rounds: dict[str, list[Measured]]) -> dict[str, Any]:
    lengths = next(iter(rounds.values()))[0].run.scenario.lengths
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


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, 4) if value == value and abs(value) != float("inf") else None
    return value


if __name__ == "__main__":
    sys.exit(main())
