"""One job through hybridengine.train, timed the way trl_grpo.py times TRL; writes one JSON file.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.ours \\
        --job tiny --generation vllm --cache outputs/bench --out result.json

It is the program a user starts, with overrides only. Everything it does by default stays on: the fingerprint
check after every sync, sleep between rollouts, the mismatch metric, a metrics.jsonl record per step.

A step lasts from its start to the start of the next one, so that what happens between two steps (logging)
counts as well; one more step than needed is run for that.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

from benchmarks.peers.job import JOBS, Job, prepare  # noqa: E402  after the clock has started

ENGINES = {"hf": "transformers", "vllm": "vllm"}
#: The switch between training and rollout: first components of the phase names that belong to it.
SWITCH_PHASES = ("sync", "sleep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--generation", choices=ENGINES, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="where job models are kept")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, help="timed steps; default: the job's")
    parser.add_argument("--correction", action="store_true", help="truncated importance sampling")
    parser.add_argument("overrides", nargs="*", help="more overrides of hybridengine.train, key=value")
    arguments = parser.parse_args()
    job = JOBS[arguments.job]
    steps = arguments.steps or job.steps
    directory = arguments.out.with_suffix("")

    from hybridengine import train

    starts = record_step_starts()
    status = train.main(
        overrides(job, arguments, directory, total_steps=job.warmup_steps + steps + 1) + arguments.overrides
    )
    if status != 0:
        sys.exit(status)
    if int(os.environ["RANK"]) == 0:
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        result = measurement(job, starts, [record for record in records if record["step"] > 0], steps=steps)
        arguments.out.write_text(json.dumps(result))


def overrides(job: Job, arguments: argparse.Namespace, directory: Path, *, total_steps: int) -> list[str]:
    """The job as overrides of hybridengine.train."""
    model, data = prepare(job, arguments.cache)
    tp = job.tp if arguments.generation == "vllm" else 1
    return [
        f"name={directory.name}",
        f"output_dir={directory}",
        f"seed={job.seed}",
        f"steps={total_steps}",
        "validate_every=0",
        "logging=quiet",
        "checkpoint.export=false",
        "checkpoint.resume=never",
        f"model.path={model}",
        f"data.train={data}",
        "data.chat='false'",
        f"data.max_prompt_tokens={job.prompt_tokens}",
        f"data.prompts_per_step={job.prompts}",
        "reward.fn=benchmarks.peers.job:our_reward",
        f"rollout={ENGINES[arguments.generation]}",
        f"rollout.tp={tp}",
        f"rollout.samples_per_prompt={job.samples}",
        f"rollout.max_tokens={job.max_tokens}",
        f"rollout.max_num_seqs={job.sequences * tp // job.world_size}",
        "rollout.temperature=1.0",
        "rollout.dtype=float32",
        "train.dtype=float32",
        f"train.lr={job.learning_rate}",
        "train.weight_decay=0.0",
        "train.max_grad_norm=1.0",
        f"train.max_tokens_per_micro_batch={job.tokens_per_step // job.world_size}",
        "algorithm.loss_aggregation=token-mean",
        f"algorithm.correction={'tis' if arguments.correction else 'none'}",
    ]


def record_step_starts() -> list[tuple[float, float]]:
    """(Wall time, this process's processor time) at the start of each step, filled in as the loop runs."""
    from hybridengine.tracing import PhaseTimer

    starts: list[tuple[float, float]] = []
    original = PhaseTimer.start_step

    @functools.wraps(original)
    def start_step(self: Any, step: int) -> None:
        starts.append((time.perf_counter(), time.process_time()))
        original(self, step)

    PhaseTimer.start_step = start_step  # type: ignore[method-assign]
    return starts


def measurement(
    job: Job, starts: list[tuple[float, float]], records: list[dict[str, float]], *, steps: int
) -> dict[str, Any]:
    """The result of one arm, in the form that trl_grpo.py writes, from step starts and metrics records.

    Raises:
        ValueError: the run did other work than the job's, or fewer steps.
    """
    timed = slice(job.warmup_steps, job.warmup_steps + steps)
    if len(starts) != job.warmup_steps + steps + 1 or len(records) != len(starts):
        raise ValueError(
            f"{len(starts)} step starts and {len(records)} records; {job.warmup_steps + steps + 1} expected"
        )
    tokens = {record["perf/tokens"] for record in records}
    if tokens != {job.tokens_per_step}:
        raise ValueError(f"steps of {sorted(tokens)} tokens; the job needs exactly {job.tokens_per_step}")
    wall, cpu = ([after - before for before, after in pairwise(times)] for times in zip(*starts, strict=True))
    phases = sorted({name for record in records for name in record if name.startswith("time/")} - {"time/step"})
    every = {name.removeprefix("time/"): [record.get(name, 0.0) for record in records[timed]] for name in phases}
    return {
        "engine_start_seconds": starts[0][0] - STARTED,
        "step_seconds": wall[timed],
        "step_cpu_seconds": cpu[timed],
        "phase_seconds": {
            "generation": every.get("rollout", [0.0] * steps),
            "sync": total([seconds for name, seconds in every.items() if name.split("/")[0] in SWITCH_PHASES], steps),
        },
        "own_phase_seconds": every,
        "responses_per_step": job.sequences,
        "mismatch": max((record.get("sampling/logp_difference/max", 0.0) for record in records), default=None),
    }


def total(columns: list[list[float]], steps: int) -> list[float]:
    """Step-wise sum of several phases; zeros where there are none."""
    return [sum(column[i] for column in columns) for i in range(steps)]


if __name__ == "__main__":
    main()
