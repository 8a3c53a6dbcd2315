"""Transformer Engine's layers against megatron's local ones, in everything that goes by parameter names.

Transformer Engine has no CPU kernels: the real one can't run here. Megatron's own wrappers, specs and the engine run as
they would over it, on the stand-in of :mod:`tests.te_standin`, with norm and projection in one module, grouped experts
and fused rotary angles. ``tests/gpu/test_transformer_engine_cuda.py`` compares the real one with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from hybridengine.distributed.world import World
from hybridengine.engines.train.megatron.engine import MegatronEngine
from tests.distributed.engines.train.fsdp.test_engine import make_samples
from tests.distributed.engines.train.megatron.test_engine import MODELS, SP, close, make_engine, next_losses, train_cut
from tests.distributed.ranks import run_ranks
from tests.tiny import make_tiny

#: (model, changes of TRAIN) by name, on two ranks.
CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-sp": ("qwen2", SP),
    "tp2-qk-norm": ("qwen3-tied", {"tp": 2}),
    "tp2-biases": ("llama-biases", SP),
    "pp2-shared-expert": ("qwen2-moe", {"pp": 2, "max_tokens_per_micro_batch": 40}),
    "ep2-recompute": ("qwen3-moe", {"ep": 2, "activation_checkpointing": True}),
    "tp2-experts": ("mixtral", SP),
}
#: What is written and read back.
LIVES = {"dense": ("qwen3-tied", SP), "experts": ("qwen3-moe", {"ep": 2})}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("te")
    used = {model for model, _ in (*CUTS.values(), *LIVES.values())}
    return {name: make_tiny(root / name, MODELS[name][0], **MODELS[name][1]) for name in used}


# -- what the ranks do ----------------------------------------------------------------------------------------------


def use_standin() -> None:
    from tests import te_standin

    te_standin.install()
    from hybridengine.engines.train.megatron import engine
    from hybridengine.engines.train.megatron.kernels import Kernels

    engine.choose = lambda train, is_cuda: Kernels(True, True, "the stand-in")


def described(engine: MegatronEngine) -> dict[str, Any]:
    """What follows from a parameter's name and place, by the name it has in the shard map."""
    tensors = engine.policy.tensors
    decayed = {
        id(param)
        for part in engine.optimizer.parts
        for param, (group, _) in part.model_param_group_index_map.items()
        if part.optimizer.param_groups[group]["wd_mult"]
    }
    return {
        "loaded": {name: param.detach().clone() for name, param in tensors.items()},
        "decayed": {name for name, param in tensors.items() if id(param) in decayed},
        "sequence parallel": {name for name, param in tensors.items() if getattr(param, "sequence_parallel", False)},
        "cut": {name for name, param in tensors.items() if param.tensor_model_parallel},
        "modules": {name for chunk in engine.policy.chunks for name, _ in chunk.named_parameters()},
    }


def live(world: World, paths: dict[str, Path], directory: Path, standin: bool, others: str | None) -> dict[str, Any]:
    """Train every cut; describe, export, save; go on, and go on from what ``others`` have saved."""
    if standin:
        use_standin()
    mine = directory / ("standin" if standin else "local")
    found: dict[str, Any] = {name: train_cut(world, paths[model], changes) for name, (model, changes) in CUTS.items()}
    samples = make_samples()
    for name, (model, changes) in LIVES.items():
        engine = make_engine(world, paths[model], changes)
        found[name] = described(engine)
        engine.export(mine / f"{name}-exported")
        next_losses(engine, samples)
        engine.save(mine / name)
        found[name]["next"] = next_losses(engine, samples)
        if others is not None:
            found[name]["resumed"] = resumed(world, paths[model], changes, directory / others / name)
    return found


def resumed(world: World, path: Path, changes: dict[str, Any], checkpoint: Path) -> list[float]:
    engine = make_engine(world, path, changes)
    engine.load(checkpoint)
    return next_losses(engine, make_samples())


def resume_all(world: World, paths: dict[str, Path], directory: Path) -> dict[str, list[float]]:
    return {name: resumed(world, paths[model], changes, directory / name) for name, (model, changes) in LIVES.items()}


@pytest.fixture(scope="module")
def lived(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], Path]:
    """What each rank found, over the local layers and over the stand-in; where they wrote."""
    directory = tmp_path_factory.mktemp("lives")
    local = run_ranks(2, live, models, directory, False, None, timeout=280)
    standin = run_ranks(2, live, models, directory, True, "local", timeout=280)
    return local, standin, directory


# -- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_same_logits_gradients_and_steps(lived: Any, cut: str) -> None:
    """To 1e-6: the same products in the same order; rotary angles and the activation's gradient round otherwise."""
    local, standin = lived[0][0][cut], lived[1][0][cut]
    assert standin["losses"] == pytest.approx(local["losses"], abs=1e-6)
    assert standin["norms"] == pytest.approx(local["norms"], rel=1e-6)
    if local["logits"] is not None:
        torch.testing.assert_close(standin["logits"], local["logits"], atol=1e-6, rtol=0)
    if local["gradients"] is not None:
        close(standin["gradients"], local["gradients"], 1e-6)
    close(standin["params"], local["params"], 2e-6)


@pytest.mark.parametrize("name", LIVES)
def test_the_modules_differ_and_what_goes_by_names_does_not(lived: Any, name: str) -> None:
    for local, standin in zip(lived[0], lived[1], strict=True):
        mine, theirs = standin[name], local[name]
        assert any(module.endswith("linear_qkv.layer_norm_weight") for module in mine["modules"])
        assert (name == "experts") == any("mlp.experts.linear_fc1.weight" in module for module in mine["modules"])
        assert list(mine["loaded"]) != list(theirs["loaded"]) and mine["modules"] != theirs["modules"]
        for what in ("decayed", "sequence parallel", "cut"):
            assert mine[what] == theirs[what], what
        assert not any("norm" in tensor for tensor in mine["decayed"]) and mine["decayed"]
        assert set(mine["loaded"]) == set(theirs["loaded"])
        assert all(torch.equal(tensor, theirs["loaded"][key]) for key, tensor in mine["loaded"].items())
    if name == "dense":
        assert "decoder.layers.0.input_layernorm.weight" in mine["sequence parallel"]
        assert "decoder.layers.0.pre_mlp_layernorm.weight" in mine["sequence parallel"]


@pytest.mark.parametrize("name", LIVES)
def test_the_export_is_the_checkpoint_bit_for_bit(lived: Any, models: dict[str, Path], name: str) -> None:
    exported = {key: t for file in (lived[2] / f"standin/{name}-exported").glob("*.safetensors")
                for key, t in load_file(file).items()}  # fmt: skip
    source = load_file(models[LIVES[name][0]] / "model.safetensors")
    assert set(exported) == set(source)
    assert all(torch.equal(exported[key], tensor) for key, tensor in source.items())


@pytest.mark.parametrize("name", LIVES)
def test_checkpoints_have_the_same_entries(lived: Any, name: str) -> None:
    local, standin = (
        dcp.FileSystemReader(lived[2] / who / name).read_metadata().state_dict_metadata for who in ("local", "standin")
    )
    assert {key: getattr(entry, "size", None) for key, entry in local.items()} == {
        key: getattr(entry, "size", None) for key, entry in standin.items()
    }


def test_each_resumes_the_others_checkpoint(lived: Any, models: dict[str, Path]) -> None:
    local, standin, directory = lived
    from_standin = run_ranks(2, resume_all, models, directory / "standin", timeout=200)[0]
    for name in LIVES:
        assert standin[0][name]["resumed"] == pytest.approx(local[0][name]["next"], abs=1e-6)
        assert from_standin[name] == pytest.approx(standin[0][name]["next"], abs=1e-6)
