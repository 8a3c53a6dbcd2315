"""Families of models on the real vLLM: every side scores the same tokens alike, and buffers follow the trainer.

The quick ones stand for what is special: buffers and a 16-bit activation (apertus), soft caps and windows (gemma2),
LongRoPE, experts whose router has a correction bias (glm4-moe), and a family that vLLM serves through transformers, in
processes of its own (arcee). All others: `make families`, which is also the slow test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.families import FAMILIES, TOLERANCE, config_for, main, make_model, run_family
from hybridengine.distributed.world import World
from hybridengine.memory.residency import ROLLOUT_WEIGHTS
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.engine

#: family -> tensor-parallel size.
QUICK = {"apertus": 2, "gemma2": 2, "phi3-longrope": 1, "glm4-moe": 2, "arcee": 1}


@pytest.mark.parametrize("family", QUICK)
def test_every_side_agrees(family: str) -> None:
    found = run_family(family, QUICK[family])
    assert found["outcome"] == "right", found["why"]
    assert set(found["sides"]) == {"packed", "padded", "transformers"}
    assert found["largest"] <= TOLERANCE


def buffers_follow(world: World, path: str, method: str) -> list[str]:
    """What the engine holds after syncs of changed buffers; wrong ones are found by the fingerprint."""
    from hybridengine.placement.colocated import build_engines, time_share
    from hybridengine.placement.parts import EngineOptions
    from hybridengine.sync.transfer.base import FingerprintMismatchError
    from hybridengine.tracing import PhaseTimer

    config = config_for(Path(path), FAMILIES["apertus"], world.size)
    config.sync.method = method
    options = EngineOptions(model_path=Path(path), max_model_len=96, total_steps=1, eos_token_ids=[])
    engines: Any = build_engines(config, world, options, log_rank0=lambda text: None)
    sharding = time_share(config, world, engines, PhaseTimer(), log_rank0=lambda text: None)
    trainer = engines.train.policy.buffers
    said = []
    for version in range(3):
        for buffer in trainer.values():
            buffer.add_(0.25 * version)
        sharding.phases.residency.invalidate(ROLLOUT_WEIGHTS)
        sharding.enter_rollout_mode()
        live = engines.rollout.live_tensors()
        named = [(name, tensor) for name, tensor in live.items() if name.endswith(("act_fn.beta", "act_fn.eps"))]
        assert len(named) == len(trainer)
        assert all(torch.equal(tensor, trainer[name]) for name, tensor in named), f"after sync {version}"
        said.append(f"{len(named)} equal")
    if method == "gather":  # it reads everything back, always
        load = engines.rollout.load_weight

        def forgetful(name: str, full: torch.Tensor) -> None:
            load(name, full + 1 if name.endswith("act_fn.beta") else full)

        engines.rollout.load_weight = forgetful
        sharding.phases.residency.invalidate(ROLLOUT_WEIGHTS)
        with pytest.raises(FingerprintMismatchError, match="act_fn.beta"):
            sharding.enter_rollout_mode()
        said.append("found")
    sharding.close()
    return said


@pytest.mark.parametrize(("method", "ranks"), [("pull", 2), ("gather", 1)], ids=["pull-tp2", "gather-tp1"])
def test_buffers_follow_the_trainer(tmp_path: Path, method: str, ranks: int) -> None:
    path = make_model(tmp_path / "m", FAMILIES["apertus"])
    expected = ["6 equal"] * 3 + ["found"] * (method == "gather")
    assert run_ranks(ranks, buffers_follow, str(path), method, timeout=240) == [expected] * ranks


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_families_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them at tensor-parallel sizes 1 and 2; about half an hour on two cores."""
    status = main([])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["wrong"] == [] and summary["crashed"] == [] and status == 0
    assert len(summary["right"]) >= 30 and max(summary["largest"].values()) <= TOLERANCE
