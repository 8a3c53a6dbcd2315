"""Memory that comes and goes changes nothing but the memory: curves, syncs, what is measured, and running out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, SMALL, command, curve, environment, records, run

NUMBERS = ("loss", "grad_norm", "reward", "kl", "completions/mean_length", "lr")
#: Every optional phase: old log-probabilities (two optimizer steps per rollout), a reference, checkpoints, validation.
JOB = [
    *SMALL, "steps=3", "algorithm.mini_batches=2", "algorithm.kl_coef=0.05", "checkpoint.every=2", "validate_every=2",
    "logging.plot=true",
]  # fmt: skip
PHASES = ("sync", "rollout", "reference", "old_logprobs", "forward_backward", "optimizer")
ENGINES = [
    pytest.param(["rollout=transformers", "rollout.tp=1"], id="transformers"),
    pytest.param(["rollout=vllm", "rollout.tp=2"], id="vllm-tp2", marks=[pytest.mark.slow, pytest.mark.engine]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_offloading_to_disk_changes_no_bit_of_the_curves(small_model: Path, tmp_path: Path, engine: list[str]) -> None:
    """Over two ranks, whose shards the peers map; both runs hand every policy version over once."""
    disk = tmp_path / "disk"
    disk.mkdir()
    moving, staying = tmp_path / "moving", tmp_path / "staying"
    job = [*JOB, *engine, f"model.path={small_model}"]
    told = run([*job, f"output_dir={moving}", f"memory.offload_dir={disk}"], ranks=2).stdout
    run([*job, f"output_dir={staying}", "rollout.sleep_level=0"], ranks=2)
    assert "trainer_params, optimizer, reference to disk; rollout_weights, kv_cache dropped" in " ".join(told.split())
    assert curve(moving, *NUMBERS) == curve(staying, *NUMBERS)
    assert not any(disk.iterdir()), "the files have no names and go with the processes"
    for directory in (moving, staying):
        steps = [record for record in records(directory) if record["step"] > 0]
        # Rollouts at versions 0, 2, 4 and, to validate at the end, 6; the other versions are never generated with.
        assert [record["sync/count"] for record in steps] == [1, 2, 3]
        for record in steps:
            assert record["sync/bytes_received"] > 0 and record["sync/seconds"] > record["sync/wait_seconds"]
            for phase in PHASES:
                assert record[f"memory/{phase}/peak_gib"] >= record[f"memory/{phase}/used_gib"] > 0, phase
            assert record["memory/peak_gib"] == max(v for k, v in record.items() if k.endswith("peak_gib"))
            assert record["memory/owner/trainer_params_gib"] > 0 and record["memory/owner/optimizer_gib"] > 0
        assert (directory / "report.png").stat().st_size > 0
    check_where_owners_were(phases_of(moving), moves=True)
    check_where_owners_were(phases_of(staying), moves=False)


def phases_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Of the last step: phase -> what it held, as the summary has it."""
    return {row["phase"]: row for row in json.loads((directory / "summary.json").read_text())["memory"]}


def check_where_owners_were(phases: dict[str, dict[str, Any]], *, moves: bool) -> None:
    assert set(PHASES) <= set(phases)
    for phase, here, away in (
        ("rollout", "rollout_weights", "trainer_params"),
        ("rollout", "rollout_weights", "optimizer"),
        ("reference", "reference", "optimizer"),
        ("forward_backward", "trainer_params", "rollout_weights"),
        ("optimizer", "optimizer", "reference"),
    ):
        held = phases[phase]["owners_gib"]
        assert held[here] > 0, (phase, here)
        assert (away in held) != moves, (phase, away)
    elsewhere = phases["rollout"]["elsewhere_gib"]
    assert set(elsewhere) == ({"trainer_params", "optimizer", "reference"} if moves else set())


HUNGRY = """
import torch
from hybridengine.engines.train.optim import ShardedAdamW

def step(self, lr):
    torch.empty(1 << 60, dtype=torch.uint8)  # more than any address space has

ShardedAdamW.step = step

def score(prompt, response, answer, **kwargs):
    return float(len(response) > 2)
"""


def test_running_out_of_memory_says_where_and_what_would_help(small_model: Path, tmp_path: Path) -> None:
    """A real allocation that the optimizer step cannot get (the reward file asks for it there)."""
    reward = tmp_path / "hungry.py"
    reward.write_text(HUNGRY)
    job = [*SMALL, "rollout=transformers", "rollout.tp=1", f"model.path={small_model}", f"output_dir={tmp_path}/out"]
    done = subprocess.run(
        command([*job, "steps=1", f"reward.fn={reward}:score"]),
        capture_output=True, text=True, timeout=200, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    message = done.stderr[done.stderr.rindex("out of memory in phase") :]
    assert message.startswith("out of memory in phase 'optimizer' (")
    for text in ("on the device: ", "trainer_params", "train.reshard_after_forward=true", "doctor memory"):
        assert text in message, (text, message)
