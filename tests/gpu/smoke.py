"""The whole program on one GPU, check by check: `make gpu-smoke`.

    python3 -m tests.gpu.smoke                              # every check, 10 to 15 minutes expected (not yet measured)
    python3 -m tests.gpu.smoke --only quickstart,sleep-1    # some of them; --list names them
    python3 -m tests.gpu.smoke --stand-in                   # without a GPU, over the stand-ins of tests/cuda

Each check is a short training run at world size 1, in a process of its own: the quickstart's model and task, FSDP2 or
Megatron, and vLLM. It passes when the run ends well, the weights change, and

- the log-probabilities that the rollout engine gave its tokens are the trainer's, up to a limit that depends on the
  dtype: in every step, so after syncs, sleeps and captured CUDA graphs too;
- where a check names another one, both have the same curves: equal to the last bit, or close.

float32 has two limits. vLLM's float32 attention on a GPU is written in Triton, whose products are tf32 by default (10
bits of mantissa): differences around 1e-3 are expected then. TRITON_F32_DEFAULT=ieee makes them float32's, and a
smaller limit can hold; every float32 check but "tf32" sets it, with a kernel cache of its own.

Results are written after every check to docs/results/gpu-smoke-<date>.md and .json; what an earlier call of the same
day wrote about other checks stays there. The last line printed is one JSON object; the exit status is 1 when a check
failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu_results import Row, write
from hybridengine.report.summary import commit, versions
from tests import ROOT
from tests.e2e.runs import SMALL, curve, records

STEPS = 4
#: Of every check; the rest is the quickstart's.
JOB = (
    "+experiment=quickstart", "rollout.tp=1", f"steps={STEPS}", "validate_every=0", "logging.plot=false",
    "logging.report=false", "logging.tensorboard=false", "checkpoint.export=false",
)  # fmt: skip
ON_GPU = ("rollout.gpu_memory_utilization=0.2",)
#: A job that a CPU computes in seconds, and a KV cache that vLLM need not look for room for.
ON_STAND_IN = (*SMALL[1:], f"steps={STEPS}", "rollout.engine_kwargs={kv_cache_memory_bytes: 16777216}")
EAGER, BFLOAT16 = "rollout.enforce_eager=true", ("train.dtype=bfloat16", "rollout.dtype=bfloat16")
CURVE = ("loss", "grad_norm", "reward", "completions/mean_length")
MISMATCH = "sampling/logp_difference/max"
#: The most that the two engines' log-probabilities of a token may differ.
IEEE, TF32, ROUNDED = 1e-4, 2e-2, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One run and what is expected of it.

    Attributes:
        closest: the most that log-probabilities of rollout and trainer may differ.
        same_as: a check whose curves this one's must equal.
        within: 0 for equal to the last bit, else the most that a number of the curves may differ.
        ieee: float32 products in Triton's kernels rather than tf32.
        resumed: the run is cut off after half of its steps and started again.
        stand_in: whether the stand-ins can run it too.
    """

    what: str
    overrides: tuple[str, ...] = (EAGER,)
    closest: float = IEEE
    same_as: str = ""
    within: float = 0.0
    ieee: bool = True
    resumed: bool = False
    stand_in: bool = True


def _sleep(level: int, *more: str) -> tuple[str, ...]:
    return (EAGER, f"rollout.sleep_level={level}", *more)


CHECKS: dict[str, Check] = {
    "quickstart": Check(
        what="FSDP2 and vLLM, float32, eager, sleep level 2, everything offloaded", overrides=_sleep(2)
    ),
    "sleep-1": Check(what="rollout weights wait in host memory", overrides=_sleep(1), same_as="quickstart"),
    "sleep-0": Check(what="the rollout engine stays awake", overrides=_sleep(0), same_as="quickstart"),
    "nothing-moves": Check(
        what="nothing sleeps and nothing is offloaded",
        overrides=_sleep(0, "memory.offload_optimizer=false", "memory.offload_weights=false"),
        same_as="quickstart",
    ),
    "resume": Check(
        what="cut off after half of the steps and resumed",
        overrides=_sleep(2, f"checkpoint.every={STEPS // 2}"),
        same_as="quickstart",
        resumed=True,
    ),
    "bfloat16": Check(what="bfloat16 in both engines", overrides=(EAGER, *BFLOAT16), closest=ROUNDED),
    "tf32": Check(what="float32 with Triton's default, tf32 products", closest=TF32, ieee=False, stand_in=False),
    "graphs": Check(
        what="CUDA graphs of decoding, not compiled, float32",
        overrides=(
            "rollout.enforce_eager=false",
            "rollout.engine_kwargs={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}",
        ),
        stand_in=False,
    ),  # fmt: skip
    "graphs-compiled": Check(
        what="vLLM's default: compiled, piecewise and full graphs, float32",
        overrides=("rollout.enforce_eager=false",),
        stand_in=False,
    ),
    "graphs-bfloat16": Check(
        what="the same in bfloat16",
        overrides=("rollout.enforce_eager=false", *BFLOAT16),
        closest=ROUNDED,
        stand_in=False,
    ),
    "gather": Check(what="weights gathered", overrides=_sleep(2, "sync.method=gather"), same_as="quickstart"),
    "collective": Check(
        what="weights by collectives", overrides=_sleep(2, "sync.method=collective"), same_as="quickstart"
    ),
    "separate": Check(
        what="vLLM in a process of its own on the same GPU, weights over CUDA IPC",
        overrides=_sleep(1, "rollout.process=separate"),
    ),
    "megatron": Check(
        what="Megatron into vLLM, float32; curves within 1e-3 of FSDP2's",
        overrides=_sleep(2, "train=megatron"),
        same_as="quickstart",
        within=1e-3,
    ),
    "megatron-bfloat16": Check(
        what="Megatron into vLLM, bfloat16", overrides=(EAGER, "train=megatron", *BFLOAT16), closest=ROUNDED
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the runs take place.

    Attributes:
        module: the program, as ``python -m`` takes it.
        job: overrides of every run, before the check's own.
        output: directory of the runs' outputs and logs.
        seconds: a run is killed after so many.
        device: for the results.
    """

    module: str
    job: tuple[str, ...]
    output: Path
    seconds: float
    device: str

    def start(self, name: str, check: Check) -> Path:
        """Run a check's job to its end; returns its directory.

        Raises:
            RunFailedError: exit status, and the end of its log.
        """
        directory = self.output / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        log = self.output / f"{name}.log"
        log.unlink(missing_ok=True)
        job = [*self.job, *check.overrides, f"output_dir={directory}"]
        if check.resumed:
            self._run([*job, f"steps={STEPS // 2}"], check, log)
        self._run(job, check, log)
        return directory

    def _run(self, overrides: Sequence[str], check: Check, log: Path) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*launcher, "-m", self.module, *overrides], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                env=environment(check), start_new_session=True,
            )  # fmt: skip
            try:
                status: int | str = process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                status = f"none within {self.seconds:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status != 0:
            raise RunFailedError(f"exit status {status}; log: {log}", ending(log.read_text(errors="replace")))


def ending(log: str, lines: int = 30) -> list[str]:
    """The last lines that the program itself printed: torchrun's report of its end comes after them, and is long."""
    found = [line for line in log.splitlines() if line.strip()]
    report = next((i for i, line in enumerate(found) if "failed (exitcode" in line), len(found))
    return found[:report][-lines:]


class RunFailedError(Exception):
    """A run did not end well; ``log`` is the end of what it printed."""

    def __init__(self, text: str, log: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.log = list(log)


def environment(check: Check) -> dict[str, str]:
    """Of a run's processes."""
    found = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "220"}
    found.setdefault("OMP_NUM_THREADS", "2")
    found.pop("TRITON_F32_DEFAULT", None)
    if check.ieee:
        # A cache of its own: kernels that were compiled with the other setting must not be taken.
        cache = Path(found.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        found |= {"TRITON_F32_DEFAULT": "ieee", "TRITON_CACHE_DIR": f"{cache}-ieee"}
    return found


def judge(check: Check, directory: Path, reference: Path | None) -> tuple[list[str], str]:
    """What is wrong with a finished run, and its figures in words."""
    trained = [record for record in records(directory) if record["step"] > 0]
    if [record["step"] for record in trained] != list(range(1, STEPS + 1)):
        return [f"steps {[record['step'] for record in trained]} were recorded, must be 1 to {STEPS}"], ""
    wrong = [
        f"step {record['step']}: {name} is {record[name]}, must be a finite number" + (" above 0" if least else "")
        for record in trained
        for name, least in (("loss", False), ("grad_norm", True), (MISMATCH, False))
        if not math.isfinite(record[name]) or (least and not record[name] > 0)
    ]
    far = max(record[MISMATCH] for record in trained)
    if far > check.closest:
        wrong.append(
            f"log-probabilities of rollout and trainer differ by {far:.2g}, at most {check.closest:g} is right"
        )
    note = f"log-probabilities within {far:.2g}"
    if reference is not None:
        problem = compare(curve(directory, *CURVE), curve(reference, *CURVE), check.within)
        wrong += [f"against {check.same_as}: {problem}"] if problem else []
        note += "" if problem else f", curves as {check.same_as}'s"
    return wrong, note


def compare(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], within: float) -> str:
    """Where two curves differ first by more than ``within``; empty where they don't."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        for name, x, y in zip(CURVE, a, b, strict=True):
            if not (abs(x - y) <= within):
                return f"step {step}: {name} is {x!r}, not {y!r}" + (f" within {within:g}" if within else "")
    return ""


def order(names: Sequence[str]) -> list[str]:
    """Checks to run: those named, and before them those that they are compared with, in the table's order."""
    wanted = set(names) | {CHECKS[name].same_as for name in names if CHECKS[name].same_as}
    return [name for name in CHECKS if name in wanted]


def carry_out(name: str, place: Place, done: dict[str, Path]) -> Row:
    """Run and judge one check; ``done``: directories of those that ran well, to which it is added."""
    check, began = CHECKS[name], time.monotonic()
    log: list[str] = []
    try:
        if check.same_as and check.same_as not in done:
            raise RunFailedError(f"not run: {check.same_as}, which it is compared with, has failed")
        directory = place.start(name, check)
        wrong, note = judge(check, directory, done.get(check.same_as))
        done[name] = directory
    except (RunFailedError, OSError, KeyError, ValueError) as error:
        wrong, note, log = [f"{type(error).__name__}: {error}"], "", getattr(error, "log", [])
    seconds = round(time.monotonic() - began, 1)
    status = "fail" if wrong else "pass"
    print(f"{status}  {name:18} {seconds:6.1f} s  {'; '.join(wrong) or note}", flush=True)
    for line in log:
        print(f"      | {line}", flush=True)
    return Row(name=name, what=check.what, status=status, seconds=seconds, note="; ".join(wrong) or note)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        for name, check in CHECKS.items():
            print(f"{name:18} {check.what}")
        return 0
    output = given.output.resolve()
    place = stand_in(output, given.seconds) if given.stand_in else gpu(output, given.seconds)
    results = given.results or (output if given.stand_in else ROOT / "docs" / "results")
    began, rows, done = time.monotonic(), [], {}  # type: ignore[var-annotated]
    conditions = {"device": place.device, **commit(), "versions": versions(), "steps": STEPS}
    today = datetime.date.today()
    for name in order(given.only):
        check = CHECKS[name]
        if given.stand_in and not check.stand_in:
            row = Row(name=name, what=check.what, status="not run", seconds=0.0, note="needs a GPU")
        elif given.minutes and time.monotonic() - began > 60 * given.minutes:
            row = Row(
                name=name, what=check.what, status="not run", seconds=0.0, note=f"{given.minutes:g} minutes are over"
            )
        else:
            row = carry_out(name, place, done)
        if row.status == "not run":
            print(f"----  {name:18}           {row.note}", flush=True)
        rows.append(row)
        write(results, "gpu-smoke", today, rows, conditions, order=list(CHECKS))
    count = {status: sum(row.status == status for row in rows) for status in ("pass", "fail", "not run")}
    outcome = {"passed": count["pass"], "failed": count["fail"], "not_run": count["not run"]}
    seconds = round(time.monotonic() - began, 1)
    print(
        json.dumps(
            {"check": "gpu-smoke", **outcome, "seconds": seconds, **conditions, "rows": [asdict(r) for r in rows]}
        )
    )
    return 1 if count["fail"] else 0


def gpu(output: Path, seconds: float) -> Place:
    """One CUDA GPU. Builds the box copies."""
    import torch

    from hybridengine import native, native_cuda

    native.build()
    native_cuda.build()
    device = torch.cuda.get_device_name(0)
    return Place(module="hybridengine.train", job=(*JOB, *ON_GPU), output=output, seconds=seconds, device=device)


def stand_in(output: Path, seconds: float) -> Place:
    """No GPU: what the checks do is tried, and of the program everything but the device's own arithmetic and memory."""
    return Place(
        module="tests.cuda.train", job=(*JOB, *ON_STAND_IN), output=output, seconds=seconds,
        device="stand-in for a GPU (tests/cuda), on a CPU",
    )  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="names of checks, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--stand-in", action="store_true", help="without a GPU: over the stand-ins of tests/cuda")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "outputs" / "gpu_smoke", help="of the runs, with their logs"
    )
    parser.add_argument(
        "--results", type=Path, help="directory of the result file; default: docs/results, with --stand-in --output"
    )  # noqa: E501
    parser.add_argument("--seconds", type=float, default=300, help="after which a single run is killed")
    parser.add_argument("--minutes", type=float, default=0, help="after which no further check is begun; 0: no limit")
    given = parser.parse_args(arguments)
    given.only = [name for name in given.only.split(",") if name]
    for name in given.only:
        if name not in CHECKS:
            parser.error(f"--only {name}: there is no such check; there are {', '.join(CHECKS)}")
    if given.stand_in or given.list:
        return given
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU and a torch that was built for CUDA; --stand-in tries the checks without one")
    return given


if __name__ == "__main__":
    sys.exit(main())
