"""Run the program as a user does: in processes of its own, on a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT

#: A job of about a second per step on two cores, small in every direction.
SMALL = [
    "+experiment=quickstart",
    "data.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "data.validation_size=16",
    "data.max_prompt_tokens=8",
    "rollout.max_tokens=4",
    "checkpoint.export=false",
    "logging.plot=false",
    "logging.report=false",
    "logging.verbose=true",
    "logging.tensorboard=false",
    "validate_every=0",
    "parity.probe=off",  # costs a sync before the first step; test_parity.py has it
    f"reward.fn={ROOT / 'tests/e2e/closeness.py'}:score",
]


def environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "220",
    }


def command(overrides: list[str], *, ranks: int = 1) -> list[str]:
    """The command line of a job; without torchrun for one rank."""
    if ranks == 1:
        return [sys.executable, "-m", "hybridengine.train", *overrides]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "hybridengine.train", *overrides]


def run(overrides: list[str], *, ranks: int = 1, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run to the end; fails the test with the output when the job fails."""
    done = subprocess.run(
        command(overrides, ranks=ranks), capture_output=True, text=True, timeout=timeout, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done


def records(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, one record per step."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def curve(output_dir: Path, *names: str) -> list[tuple[float, ...]]:
    """The named metrics of every trained step."""
    return [tuple(r[name] for name in names) for r in records(output_dir) if r["step"] > 0]
