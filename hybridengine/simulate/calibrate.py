"""From a run's own files to the costs of its phases: config.json, summary.json, metrics.jsonl, rollout-*.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridengine.report.metrics import CONFIG_FILE, METRICS_FILE
from hybridengine.report.summary import SUMMARY_FILE
from hybridengine.schedule.recorder import FILE, read_windows
from hybridengine.simulate.costs import Costs
from hybridengine.simulate.lengths import Measured
from hybridengine.simulate.scenario import Scenario

#: Phases that grow with the tokens of the batch, on the training ranks.
PER_TOKEN = ("forward_backward", "old_logprobs", "reference")
#: From the first engine step to the batch; ranks wait for the slowest replica in the last of them.
ROLLOUT = ("rollout", "reward", "exchange")
#: Phases that the simulation makes up itself, or that belong to no step in particular.
SIMULATED = (*ROLLOUT, "drain", "sync", "validation", "checkpoint")

#: Relative spread of contexts among engine steps with equal numbers of samples; below it a slope over them is noise.
MIN_SPREAD = 0.1

Windows = Sequence[Sequence[Mapping[str, Any]]]


@dataclass(slots=True, kw_only=True)
class Run:
    """A measured run.

    Attributes:
        scenario: its arm.
        costs: of its phases, means over all steps but the first ``skipped``.
        seconds_per_step: measured, validation and checkpoints aside.
        notes: what could not be told from the files, and what was assumed instead.
    """

    directory: Path
    scenario: Scenario
    costs: Costs
    seconds_per_step: float
    tokens_per_second: float
    skipped: int
    notes: list[str]


def read_run(directory: Path, *, skip: int = 1) -> Run:
    """Costs of a run.

    Args:
        skip: first steps to leave out: they compile, and meet cold caches.

    Raises:
        ValueError: a file is missing or has too few steps, by name.
    """
    config, summary = (_read_json(directory / name) for name in (CONFIG_FILE, SUMMARY_FILE))
    metrics = directory / METRICS_FILE
    if not metrics.is_file():
        raise ValueError(f"{metrics}: missing; the run needs logging.jsonl=true")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if record["step"] > skip]
    windows = read_windows(directory)
    if not steps or not any(windows):
        raise ValueError(f"{directory}: needs more than {skip} steps, and the engines' records ({FILE.format(0)})")
    rollout_ranks = config["placement"]["rollout_ranks"] if config["placement"]["name"] == "disaggregated" else 0
    train_ranks = int(summary["world_size"])
    notes: list[str] = []
    scenario = Scenario(
        schedule=config["schedule"]["name"], ranks=train_ranks + rollout_ranks, rollout_ranks=rollout_ranks,
        tp=config["rollout"]["tp"], prompts=config["data"]["prompts_per_step"],
        samples=config["rollout"]["samples_per_prompt"], slots=config["rollout"]["max_num_seqs"],
        prompt_tokens=_prompt_tokens(steps, config), lengths=measured_lengths(windows),
        staleness=config["schedule"]["staleness"], over_provision=config["schedule"]["over_provision"],
        stealing=config["rollout"]["work_stealing"],
        in_order=config["schedule"]["name"] == "async" and config["schedule"].get("order") == "start",
        pass_rate=_pass_rate(steps, config), steps=len(records),
        warmup=skip,
    )  # fmt: skip
    steady = [replica[skip:] or replica for replica in windows]
    decode, context = decode_costs(steady)
    if not has_plain_steps(steady):
        notes.append("new samples came with every engine step: what they cost is part of what a step costs")
    prefill = prefill_cost(steady, Costs(decode=decode, context=context))
    phases = [_phase_seconds(record) for record in steps]
    overhead = _rollout_overhead(scenario, steady, phases, notes)
    costs = Costs(
        decode=decode,
        context=context,
        prefill=prefill,
        train=sum(found.get(name, 0.0) for found in phases for name in PER_TOKEN)
        * train_ranks
        / sum(record["perf/tokens"] for record in steps),
        step=fmean(
            sum(seconds for name, seconds in found.items() if name not in (*SIMULATED, *PER_TOKEN))
            + record["perf/unaccounted"] * record["time/step"]
            for found, record in zip(phases, steps, strict=True)
        ),
        sync=fmean(found.get("sync", 0.0) for found in phases),
        rollout=0.0 if rollout_ranks else overhead,
        latency=overhead if rollout_ranks else 0.0,
    )
    productive = [
        record["time/step"] - found.get("validation", 0.0) - found.get("checkpoint", 0.0)
        for found, record in zip(phases, steps, strict=True)
    ]
    return Run(
        directory=directory, scenario=scenario, costs=costs, seconds_per_step=fmean(productive),
        tokens_per_second=sum(record["perf/tokens"] for record in steps) / sum(productive),
        skipped=skip, notes=notes,
    )  # fmt: skip


def decode_costs(windows: Windows) -> tuple[tuple[tuple[float, float], ...], float]:
    """Points of Costs.decode, and Costs.context.

    The price of context is the slope of seconds over context among engine steps with the same number of samples, all
    such numbers pooled; 0 where that is not positive, or where contexts differ too little to tell (answers of a few
    tokens). The points are the mean seconds per number of running samples,
    less what context cost, made non-decreasing by pooling neighbours that are out of order (isotonic regression).

    Where new samples came with every step, what they cost is part of the points, and context has no price.

    Raises:
        ValueError: no engine step at all.
    """
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * 5)
    table = "decode" if has_plain_steps(windows) else "prefill"
    for replica in windows:
        for window in replica:
            for running, values in window[table].items():
                known = values if table == "decode" else [*values[:2], 0.0, 0.0, 0.0]
                sums[running] = [a + b for a, b in zip(sums[running], known, strict=True)]
    if not sums:
        raise ValueError("the run has no engine step")
    xx = sum(context2 - context**2 / n for n, _, context, context2, _ in sums.values())
    xy = sum(both - context * seconds / n for n, seconds, context, _, both in sums.values())
    squares = sum(context**2 / n for n, _, context, _, _ in sums.values())
    slope = max(0.0, xy / xx) if xx > MIN_SPREAD**2 * squares else 0.0
    blocks: list[list[float]] = []  # weight, mean seconds, first and last number of samples
    for running in sorted(sums):
        n, seconds, context, _, _ = sums[running]
        blocks.append([n, max(1e-9, (seconds - slope * context) / n), running, running])
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            late, early = blocks.pop(), blocks.pop()
            n = early[0] + late[0]
            blocks.append([n, (early[0] * early[1] + late[0] * late[1]) / n, early[2], late[3]])
    points = {number: seconds for _, seconds, first, last in blocks for number in (first, last)}
    return tuple(sorted(points.items())), slope


def has_plain_steps(windows: Windows) -> bool:
    """Whether there is an engine step without new samples."""
    return any(window["decode"] for replica in windows for window in replica)


def prefill_cost(windows: Windows, costs: Costs) -> float:
    """Seconds per token that enters: what steps with new samples took beyond steps without."""
    extra = tokens = 0.0
    for replica in windows:
        for window in replica:
            for running, (count, seconds, context, _, new_tokens) in window["prefill"].items():
                extra += seconds - count * costs.engine_step(running) - costs.context * context
                tokens += new_tokens
    return max(0.0, extra / tokens) if tokens else 0.0


def measured_lengths(windows: Windows) -> Measured:
    """Response lengths of everything that was finished.

    Raises:
        ValueError: nothing was.
    """
    groups: dict[int, dict[int, int]] = defaultdict(dict)
    for replica in windows:
        for window in replica:
            for prompt, sample, tokens in window["lengths"]:
                groups[prompt][sample] = tokens
    if not groups:
        raise ValueError("no sample of the run was finished")
    return Measured(dict(sorted(groups.items())))


def _rollout_overhead(
    scenario: Scenario, windows: Windows, phases: Sequence[Mapping[str, float]], notes: list[str]
) -> float:
    """What comes between the slowest replica's work and the batch; known only where nothing overlaps with it."""
    if scenario.schedule not in ("sync", "partial"):
        notes.append(f"schedule={scenario.schedule} hides what a rollout costs beyond engine steps: taken as 0")
        return 0.0
    spans = [
        max(replica[i]["busy"][-1][1] for replica in windows if i < len(replica))
        - min(replica[i]["busy"][0][0] for replica in windows if i < len(replica))
        for i in range(max(len(replica) for replica in windows))
    ]
    return max(0.0, fmean(sum(found.get(name, 0.0) for name in ROLLOUT) for found in phases) - fmean(spans))


def _phase_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Top-level phases, nested ones included."""
    found: dict[str, float] = defaultdict(float)
    for name, seconds in record.items():
        if name.startswith("time/") and name != "time/step":
            found[name.split("/")[1]] += seconds
    return found


def _prompt_tokens(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> int:
    """Mean over the run: all tokens less response tokens."""
    samples = config["data"]["prompts_per_step"] * config["rollout"]["samples_per_prompt"]
    return round(fmean(record["perf/tokens"] / samples - record["completions/mean_length"] for record in steps))


def _pass_rate(steps: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> float:
    """Share of the run's groups that dynamic sampling did not replace."""
    replaced = fmean(record.get("dynamic_sampling/replaced_groups", 0.0) for record in steps)
    return config["data"]["prompts_per_step"] / (config["data"]["prompts_per_step"] + replaced)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: missing; it is written by a run that has ended")
    return json.loads(path.read_text())
