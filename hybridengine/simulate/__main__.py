"""What if: step time, tokens per second, idle time and staleness of schedules and placements that were not run.

    python -m hybridengine.simulate --run outputs/quickstart
    python -m hybridengine.simulate --run outputs/mine --ranks 64 --tp 4 --rollout-ranks 0 16 32 48 \\
        --lengths lognormal:mean=6000,p99=25000,cap=32768
    python -m hybridengine.simulate --ranks 8 --rollout-ranks 0 4 --prompts 128 --samples 8 --prompt-tokens 400 \\
        --lengths lognormal:mean=1000,p99=6000,cap=8192 --decode 1:0.012,64:0.016,256:0.030 --train 2e-4 --sync 1.5

Costs come from a run's own files (--run), from the command line, or both: what the command line gives replaces what the
run measured. The rules for what is admitted and what makes a batch are those of the program itself (schedule/pool.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridengine.simulate.calibrate import Run, read_run
from hybridengine.simulate.costs import Costs
from hybridengine.simulate.lengths import FORMS, parse
from hybridengine.simulate.scenario import OFF_POLICY, SCHEDULES, Outcome, Scenario
from hybridengine.simulate.schedules import simulate

SHAPE = (
    "ranks", "tp", "prompts", "samples", "slots", "prompt_tokens", "staleness", "over_provision", "pass_rate", "steps",
    "warmup",
)  # fmt: skip
PRICES = ("context", "prefill", "train", "step", "rollout", "sync", "latency")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        run = read_run(options.run, skip=options.skip) if options.run else None
        costs = costs_of(options, run)
        scenarios = scenarios_of(options, run)
    except ValueError as error:
        parser.error(str(error))
    outcomes = [simulate(scenario, costs) for scenario in scenarios]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(table(outcomes))
    for line in assumptions(outcomes, costs, run):
        console.print(f"- {line}", soft_wrap=True)
    if options.json:
        print(json.dumps({"arms": [outcome.as_dict() for outcome in outcomes], "costs": dataclasses.asdict(costs)}))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", type=Path, help="output_dir of a run that has ended: its costs, lengths and sizes are the defaults")
    add("--skip", type=int, default=1, help="first steps of the run to leave out (they compile)")
    add("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    add("--rollout-ranks", nargs="+", type=int, help="one arm each; 0 = colocated. Default: 0 and half of the ranks")
    add("--static", action="store_true", help="also colocated arms without work stealing")
    add("--lengths", help=f"response lengths: {FORMS}. Default: measured")
    for name, kind, text in (
        ("ranks", int, "of the whole job"),
        ("tp", int, "ranks of one replica"),
        ("prompts", int, "groups per training step"),
        ("samples", int, "per prompt"),
        ("slots", int, "samples that a replica runs at once (rollout.max_num_seqs)"),
        ("prompt-tokens", int, "of every prompt"),
        ("staleness", int, "schedule=async"),
        ("over-provision", float, "schedule=partial"),
        ("pass-rate", float, "dynamic sampling: share of groups that are not replaced, default 1"),
        ("steps", int, "simulated, default 40"),
        ("warmup", int, "of them left out, default 8"),
    ):
        add(f"--{name}", type=kind, help=text)
    add("--decode", help="samples:seconds,... of one engine step, straight lines between, such as 1:0.012,256:0.03")
    add("--context", type=float, help="seconds per engine step and token of context")
    add("--prefill", type=float, help="seconds per token that enters an engine")
    add("--train", type=float, help="seconds per token of the batch on one training rank")
    add("--step", type=float, help="seconds of a training step whatever its tokens")
    add("--rollout", type=float, help="colocated: seconds of a rollout whatever its samples")
    add("--sync", type=float, help="seconds of a weight sync")
    add("--latency", type=float, help="disaggregated: seconds from a sample's end to the trainer")
    add("--json", action="store_true", help="the last line is one JSON object")
    return parser


def costs_of(options: argparse.Namespace, run: Run | None) -> Costs:
    """Raises ValueError when neither the run nor the command line has them."""
    given: dict[str, Any] = {name: getattr(options, name) for name in PRICES if getattr(options, name) is not None}
    if options.decode is not None:
        given["decode"] = decode_points(options.decode)
    if run is not None:
        return dataclasses.replace(run.costs, **given)
    if "decode" not in given or "train" not in given:
        raise ValueError("give --run, or at least --decode and --train")
    return Costs(**given)


def decode_points(text: str) -> tuple[tuple[float, float], ...]:
    """From the command line.

    >>> decode_points("1:0.01,64:0.02")
    ((1.0, 0.01), (64.0, 0.02))
    """
    try:
        return tuple((float(n), float(seconds)) for n, seconds in (item.split(":") for item in text.split(",")))
    except ValueError:
        raise ValueError(f"--decode {text}: give samples:seconds,..., such as 1:0.012,256:0.03") from None


def scenarios_of(options: argparse.Namespace, run: Run | None) -> list[Scenario]:
    """One per placement and schedule that exist together."""
    given = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    if options.lengths not in (None, "measured"):
        given["lengths"] = parse(options.lengths)
    if run is None:
        missing = {"ranks", "prompts", "samples", "lengths"} - given.keys()
        if missing:
            raise ValueError(f"without --run, give --{' --'.join(sorted(missing))}")
        base = Scenario(**given)
    else:
        base = run.scenario.with_(
            **({"schedule": "sync", "rollout_ranks": 0, "stealing": True, "steps": 40, "warmup": 8} | given)
        )
    splits = options.rollout_ranks or [0, *([base.ranks // 2] if base.ranks > 1 else [])]
    arms = [
        base.with_(rollout_ranks=ranks, schedule=schedule)
        for ranks in splits
        for schedule in options.schedules
        if ranks or schedule not in OFF_POLICY
    ]
    if options.static:
        arms += [arm.with_(stealing=False) for arm in arms if not arm.rollout_ranks and arm.replicas > 1]
    if not arms:
        raise ValueError(f"--schedules {' '.join(options.schedules)}: not colocated; give --rollout-ranks above 0")
    return arms


def table(outcomes: Sequence[Outcome]) -> Table:
    found = Table(title="simulated; ratios to the first arm", title_justify="left")
    heads = ("arm", "s/step", "tokens/s", "", "idle: rollout", "training", "slots used", "sync", "versions behind",
             "response length", "dropped/step")  # fmt: skip
    for head in heads:
        found.add_column(head, justify="left" if head == "arm" else "right", no_wrap=head == "arm")
    for outcome in outcomes:
        found.add_row(
            outcome.scenario.name,
            f"{outcome.step_seconds:.3g}",
            f"{outcome.tokens_per_second:,.0f}",
            f"{outcome.tokens_per_second / outcomes[0].tokens_per_second:.2f}×",
            f"{outcome.rollout_idle:.0%}",
            f"{outcome.train_idle:.0%}" if outcome.scenario.rollout_ranks else "",
            f"{outcome.slots_used:.0%}",
            f"{outcome.sync_fraction:.1%}",
            f"{outcome.metric('lag/mean'):.1f}, ≤ {outcome.lag_max:.0f}",
            f"{outcome.response_length:,.0f}",
            f"{outcome.pool.dropped / len(outcome.steps):.2g}",
        )
    return found


def assumptions(outcomes: Sequence[Outcome], costs: Costs, run: Run | None) -> list[str]:
    """What the figures rest on, one sentence each."""
    first = outcomes[0].scenario
    shown = costs.decode[:: max(1, len(costs.decode) // 5)]
    points = ", ".join(f"{seconds * 1e3:.3g} ms at {n:g}" for n, seconds in shown)
    lines = [
        f"{first.prompts} prompts × {first.samples} samples of {first.prompt_tokens} prompt tokens a step; "
        f"{first.lengths.describe()}; {first.steps - first.warmup} steps after {first.warmup} of warm-up",
        f"an engine step: {points} running samples, + {costs.context:.2g} s per token of context, "
        f"+ {costs.prefill:.2g} s per token that enters; {first.slots} slots per replica of {first.tp} rank(s), "
        "whose memory holds them all",
        f"training: {costs.train:.3g} s per token and rank, shared evenly by all training ranks, + {costs.step:.3g} s "
        f"a step; a weight sync: {costs.sync:.3g} s, whatever the number of ranks",
        "order: recycled samples first, then in order of admission (nothing is known about lengths beforehand)",
        "response length: of what is trained on; where it is below the others', long groups were dropped for their age",
    ]
    if first.pass_rate < 1:
        lines.append(
            f"dynamic sampling: {1 - first.pass_rate:.0%} of the groups are replaced, each independently of the others"
        )
    if run is None:
        return lines
    measured = run.scenario
    lines.insert(
        0,
        f"costs from {run.directory}: {measured.name}, {run.seconds_per_step:.3g} s per step and "
        f"{run.tokens_per_second:,.0f} tokens/s measured, the first {run.skipped} steps aside",
    )
    lines += run.notes
    placements = {bool(outcome.scenario.rollout_ranks) for outcome in outcomes}
    if first.tp != measured.tp or placements != {bool(measured.rollout_ranks)}:
        lines.append("syncs and engine steps were measured in one layout and used for all: give --sync and --decode")
    return lines


if __name__ == "__main__":
    sys.exit(main())
