"""The whole program with engines in processes of their own, in both placements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, records, run
from tests.engines.test_separate import needs_sglang


@pytest.mark.engine
@needs_sglang
def test_sglang_generates_in_a_pool_of_its_own(small_model: Path, tmp_path: Path) -> None:
    """Weights change in the middle of samples, arrive by broadcast, and are the trainer's: tokens of the version that
    is trained have its log-probabilities."""
    job = [
        *SMALL, "rollout=sglang", "rollout.tp=1", "rollout.max_tokens=16", "placement=disaggregated",
        "schedule=async", "schedule.staleness=1", "sync.method=broadcast", "steps=3", "validate_every=3",
    ]  # fmt: skip
    done = run([*job, f"model.path={small_model}", f"output_dir={tmp_path}"], ranks=2)
    assert "1 training rank(s), 1 rollout rank(s)" in done.stdout and "sglang 1 × TP 1" in done.stdout
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [r["policy_version"] for r in steps] == [1, 2, 3]
    assert [r["sync/count"] for r in steps] == [1, 2, 3]
    assert max(r["staleness/max"] for r in steps) <= 1 and steps[-1]["staleness/dropped_groups"] == 0
    assert steps[0]["sampling/logp_difference/max"] <= 1e-5
    assert all(r.get("sampling/logp_difference/max", 0.0) <= 1e-5 for r in steps)
    assert any(r.get("sampling/off_policy_tokens", 0.0) > 0 for r in steps)
    assert all(0 < r["sampling/effective_sample_size"] <= 1 and r["rollout/restarts"] == 0 for r in steps)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["transfer"]) == (3, "broadcast")


@pytest.mark.engine
@needs_sglang
@pytest.mark.parametrize("layout", [["train.tp=2", "rollout.tp=2"], ["train.pp=2", "rollout.tp=1"]], ids=["tp2", "pp2"])
def test_megatron_trains_and_sglang_generates(small_model: Path, tmp_path: Path, layout: list[str]) -> None:
    """Row orders that agree, into one engine over both ranks; and stages, into an engine on each."""
    job = [*SMALL, "train=megatron", "rollout=sglang", *layout, "steps=2"]
    done = run([*job, f"model.path={small_model}", f"output_dir={tmp_path}"], ranks=2)
    assert "weight sync: pull" in done.stdout
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [(r["policy_version"], r["sync/count"]) for r in steps] == [(1, 1), (2, 2)]
    assert all(0 < r["sampling/logp_difference/max"] <= 1e-5 and r["grad_norm"] > 0 for r in steps)


@pytest.mark.engine
def test_vllm_in_processes_of_its_own_trains(small_model: Path, tmp_path: Path) -> None:
    """Colocated, tensor-parallel over two ranks; its weights sleep between rollouts."""
    job = [*SMALL, "rollout=vllm", "rollout.process=separate", "steps=2"]
    done = run([*job, f"model.path={small_model}", f"output_dir={tmp_path}"], ranks=2)
    assert "weight sync: pull" in done.stdout
    steps = [r for r in records(tmp_path) if r["step"] > 0]
    assert [(r["policy_version"], r["sync/count"]) for r in steps] == [(1, 1), (2, 2)]
    assert all(r["sampling/logp_difference/max"] <= 1e-5 and r["grad_norm"] > 0 for r in steps)
