"""Persistent buffers are parameters that don't train: read, described, saved, exported, and left alone by updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.families import FAMILIES, make_model
from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.engines.train.fsdp.engine import FSDPEngine
from hybridengine.types import Sample
from tests.distributed.ranks import run_ranks
from tests.fingerprints import tensor_fingerprint

#: Of two families: constants of an activation, without a dimension; a router's correction bias, beside its experts.
BUFFERS = {"apertus": "mlp.act_fn.beta", "glm4-moe": "mlp.gate.e_score_correction_bias"}


def loss(logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
    return LossResult(-logprobs.sum(), {})


def lives(world: World, path: str, out: str) -> dict[str, int]:
    """One life of an engine on every rank; returns the fingerprints that the layout says, by name."""
    engine = FSDPEngine(path, TrainConfig(lr=1e-2), world=world, total_steps=4)
    checkpoint = load_file(f"{path}/model.safetensors")
    buffers = {name: engine.local_tensors()[name] for name in engine.policy.buffers}
    assert buffers and all(torch.equal(b, checkpoint[name]) for name, b in buffers.items())
    layout = engine.shard_map()
    assert all(layout.multiplicity(name) == world.size for name in buffers), "whole on every rank"
    assert {name for name, _ in engine.full_parameters()} == set(layout.params) >= set(buffers)
    ids = [5, 6, 7, 8]
    sample = Sample(prompt_ids=ids, response_ids=ids, loss_mask=[True] * 4, advantages=[1.0] * 4)
    engine.forward_backward([sample], loss)
    engine.optimizer_step()
    assert all(torch.equal(b, checkpoint[name]) for name, b in buffers.items()), "not trained"
    engine.save(Path(out) / "state")
    for buffer in buffers.values():
        buffer.fill_(9.0)
    engine.load(Path(out) / "state")
    assert all(torch.equal(b, checkpoint[name]) for name, b in buffers.items()), "restored"
    assert all(engine.local_tensors()[name] is b for name, b in buffers.items()), "in place"
    engine.export(Path(out) / "model")
    return {name: tensor_fingerprint(b) for name, b in buffers.items()}


@pytest.mark.parametrize("family", BUFFERS)
@pytest.mark.parametrize("ranks", [1, 2], ids=["1-rank", "2-ranks"])
def test_buffers_from_reading_to_exporting(tmp_path: Path, family: str, ranks: int) -> None:
    path = make_model(tmp_path / "m", FAMILIES[family])
    found = run_ranks(ranks, lives, str(path), str(tmp_path))
    before = load_file(path / "model.safetensors")
    after = {name: t for file in (tmp_path / "model").glob("*.safetensors") for name, t in load_file(file).items()}
    assert set(after) == set(before), "the export has what the checkpoint has"
    names = [name for name in before if name.endswith(BUFFERS[family])]
    assert names and all(torch.equal(after[name], before[name]) for name in names)
    assert set(found[0]) >= set(names) and all(other == found[0] for other in found)
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(torch.equal(plain.state_dict()[name], before[name]) for name in names)
