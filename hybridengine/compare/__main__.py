"""Colocated or disaggregated, and under which schedule: your own job in every arm, one answer.

    hybridengine compare +experiment=quickstart                                   # 2 CPU processes, 15 minutes
    hybridengine compare --nproc-per-node 8 --minutes 120 model.path=... data.train=... reward.fn=...
    hybridengine compare --arms colocated-sync,disaggregated-4+4-async ...        # these alone
    hybridengine compare --from outputs/compare-mine                              # verdict and forecasts again

Every arm is the whole program under torchrun in fresh processes, a few steps of it; arms take turns over the rounds.
The same prompts, seeds and samples in all of them; nothing is written outside --out, where an interrupted comparison
goes on.
Arms: placement, training + rollout ranks, schedule, rollout.tp (1 where nothing is said): colocated-partial,
disaggregated-6+2-async-tp2, disaggregated-6+2-async_in_order (schedule.order=start).

The last line printed is one JSON object. Exit statuses: 0 an answer; 1 no arm ran; 2 something to be changed by you.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridengine.compare.arms import Arm
from hybridengine.config.arguments import Arguments, read_arguments
from hybridengine.config.compose import build
from hybridengine.config.schema import ConfigError

RESULT_FILE, GANTT_FILE = "compare.json", "gantt.png"


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options, job = parser().parse_known_args(given)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 170)
    try:
        arguments = read_arguments(job)
        return _from(options, console) if options.directories else _compare(options, arguments, console)
    except (ConfigError, ValueError) as error:
        console.print(f"hybridengine compare: {error}", markup=False, soft_wrap=True)
        return 2


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="hybridengine compare",
        usage="hybridengine compare [options] key=value ...   (the overrides of any training run)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--nproc-per-node", "--ranks", dest="ranks", type=int, help="ranks of every arm; default: GPUs here, or 2")
    add("--arms", default="", help="names with commas between; default: all that make sense, as far as time allows")
    add("--steps", type=int, default=8, help="counted steps of each run (8)")
    add("--warmup", type=int, default=2, help="steps before those (2)")
    add("--rounds", type=int, default=2, help="runs of each arm (2)")
    add("--minutes", type=float, default=15.0, help="budget of all runs together (15)")
    add("--out", type=Path, help="directory of the comparison; default: outputs/compare-NAME")
    add("--plan", action="store_true", help="show which arms would run, and end")
    add("--from", dest="directories", type=Path, nargs="+", metavar="DIR",
        help="run nothing: a comparison's directory, or output_dirs of finished runs")  # fmt: skip
    return found


def _compare(options: argparse.Namespace, arguments: Arguments, console: Console) -> int:
    from hybridengine.compare.fit import machine_here
    from hybridengine.compare.plan import Settings, make_plan
    from hybridengine.compare.run import Comparison

    if "RANK" in os.environ:
        raise ConfigError("RANK is set: start the comparison without torchrun; it starts the ranks of every arm itself")
    config = build(arguments.overrides, arguments.config_dirs)
    ranks = options.ranks if options.ranks is not None else _gpus() or 2
    settings = Settings(
        job=tuple(arguments.overrides), ranks=ranks, steps=options.steps, warmup=options.warmup,
        rounds=options.rounds, minutes=options.minutes, arms=tuple(filter(None, options.arms.split(","))),
        out=options.out or Path("outputs") / f"compare-{config.name}", config_dirs=tuple(arguments.config_dirs),
    )  # fmt: skip
    plan = make_plan(settings, machine_here(ranks), tp=config.rollout.tp, method=config.sync.method)
    if options.plan:
        for arm in plan.arms:
            console.print(f"{arm.name}: {shlex.join(arm.overrides(method=config.sync.method))}", markup=False)
        for name, reason in plan.left_out.items():
            console.print(f"{name}: left out: {reason}", markup=False)
        return 0
    comparison = Comparison(settings, plan, console, method=config.sync.method)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the arm that runs is ended, too
    try:
        runs = comparison.run()
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; the same command goes on in {settings.out}")
        return 130
    arms = {arm.name: arm for arm in plan.arms}
    extra = {"ranks": ranks, "steps": settings.steps, "warmup": settings.warmup, "seconds": time.monotonic() - began}
    return finish(
        {name: arms[name] for name in runs.rounds}, runs, settings.out, console,
        job=shlex.join(settings.job), method=config.sync.method, extra=extra,
    )  # fmt: skip


def _from(options: argparse.Namespace, console: Console) -> int:
    from hybridengine.compare.load import load

    arms, runs, out, job = load(options.directories, warmup=options.warmup)
    return finish(arms, runs, options.out or out, console, job=job, method="auto", extra={})


def finish(
    arms: dict[str, Arm], runs: Any, out: Path, console: Console, *, job: str, method: str, extra: dict[str, Any]
) -> int:
    """Verdict, tables, page, picture, JSON."""
    from hybridengine.compare import gantt
    from hybridengine.compare.page import PAGE_FILE, write_page
    from hybridengine.compare.result import forecast_table, make_report, notes, phase_table, sentence, table
    from hybridengine.report.summary import commit, versions

    if not runs.rounds:
        for name, error in runs.failed.items():
            console.print(f"{name}: {error}", markup=False)
        return 1
    report = make_report(
        arms, runs.rounds, left_out=runs.left_out, failed=runs.failed, method=method,
        conditions={**extra, "cores": os.cpu_count(), **commit(), "versions": versions()},
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_page(out / PAGE_FILE, report, job=job)
    gantt.write_png(out / GANTT_FILE, report.last)
    result = report.as_dict()
    (out / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    console.print(table(report))
    console.print(phase_table(report))
    if report.forecasts:
        console.print(forecast_table(report))
    for name, reason in {**report.left_out, **report.failed}.items():
        console.print(f"- {name}: {'failed' if name in report.failed else 'left out'}: {reason}", markup=False)
    for note in notes(report):
        console.print(f"- {note}", markup=False, soft_wrap=True)
    console.print(f"\n{sentence(report)}", markup=False, soft_wrap=True, style="bold")
    console.print(f"  hybridengine train {job} {report.override_lines[report.verdict.winner]}", markup=False,
                  soft_wrap=True)  # fmt: skip
    console.print(f"  {out / PAGE_FILE}, {out / GANTT_FILE}, {out / RESULT_FILE}", markup=False, soft_wrap=True)
    print(json.dumps(result))
    return 0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
