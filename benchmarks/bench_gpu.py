"""Everything that is measured on one GPU, in turn: `make bench-gpu`.

    python3 -m benchmarks.bench_gpu                     # all parts
    python3 -m benchmarks.bench_gpu --only device       # some of them

- device: the box copy, and weights between two processes on the one GPU over CUDA IPC, with and without a cast, over a
  plain copy of the same bytes (bench_device; needs nvcc, not vLLM)
- sleep: what is offloaded over plain copies of the same bytes through the same link, and whole steps (bench_sleep)
- bill: four steps of a 1.5 B model in bfloat16, the phases' peaks beside the bill (bench_bill; needs vLLM)

Each part is a process of its own, and one that fails doesn't keep the next from running. Results are written after each
to docs/results/bench-gpu-<date>.md and .json. The last line is one JSON object; exit status 1 when a part failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_results import Row, write
from hybridengine.report.summary import commit, versions

ROOT = Path(__file__).resolve().parents[1]


def device_note(found: Mapping[str, Any]) -> str:
    return "; ".join(f"{row['what']}: {row['over_floor']:.2f} of a plain copy" for row in found["rows"])


def sleep_note(found: Mapping[str, Any]) -> str:
    owners = [
        f"{owner} {kind} {ratio:.2f}"
        for owner, kinds in found["over_plain_copy"].items()
        for kind, ratio in kinds.get("link", {}).items()
    ]
    return f"over plain copies: {', '.join(owners)}; steps, moving over staying: {found['step_time_ratio']:.2f}"


def bill_note(found: Mapping[str, Any]) -> str:
    phases = [f"{name} {row['measured_gib']:.2f} of {row['billed_gib']:.2f}" for name, row in found["phases"].items()]
    return f"GiB measured of those billed: {', '.join(phases)}; {found['tokens_per_second']:.0f} tokens/s"


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark that prints one JSON object as its last line; ``note`` puts that into words."""

    what: str
    command: tuple[str, ...]
    note: Callable[[Mapping[str, Any]], str]


PARTS = {
    "device": Part("box copies, weights between processes", ("benchmarks.bench_device",), device_note),
    "sleep": Part("offloading over the link, steps that move memory", ("benchmarks.bench_sleep",), sleep_note),
    "bill": Part("1.5 B in bfloat16, peaks beside the bill", ("benchmarks.bench_bill",), bill_note),
}


def measure(name: str, part: Part, seconds: float) -> Row:
    """Run a part; what it prints is shown as it comes."""
    began = time.monotonic()
    print(f"== {name}: {part.what}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", *part.command], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        problem = f"exit status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, problem = process.communicate()[0], f"not ended within {seconds:.0f} s"
    print(output, end="", flush=True)
    figures: dict[str, Any] = {}
    if not problem:
        try:
            figures = json.loads(output.strip().splitlines()[-1])
            note = part.note(figures)
        except (ValueError, IndexError, KeyError) as error:
            problem = f"its last line is not the JSON object expected ({type(error).__name__}: {error})"
    taken = round(time.monotonic() - began, 1)
    status = "fail" if problem else "pass"
    print(f"{status}  {name:8} {taken:6.1f} s  {problem or note}", flush=True)
    return Row(name=name, what=part.what, status=status, seconds=taken, note=problem or note, figures=figures)


def main() -> int:
    given = parse()
    import torch

    conditions = {"device": torch.cuda.get_device_name(0), **commit(), "versions": versions()}
    rows = []
    for name in [name for name in PARTS if name in given.only]:
        rows.append(measure(name, PARTS[name], given.seconds))
        write(given.results, "bench-gpu", datetime.date.today(), rows, conditions, order=list(PARTS))
    failed = sum(row.status == "fail" for row in rows)
    print(json.dumps({"benchmark": "gpu", "failed": failed, **conditions, "rows": [asdict(row) for row in rows]}))
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="directory of the result file")
    parser.add_argument("--seconds", type=float, default=570, help="after which a part is killed")
    given = parser.parse_args(arguments)
    given.only = [name for name in given.only.split(",") if name]
    for name in given.only:
        if name not in PARTS:
            parser.error(f"--only {name}: there is no such part; there are {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; on a CPU `make bench-reshard` and `make bench-sleep`")
    return given


if __name__ == "__main__":
    sys.exit(main())
