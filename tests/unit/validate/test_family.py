"""Models that can't run rightly are refused by name, before anything starts; those that can are not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import FAMILIES, config_for, make_model
from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.vllm.architectures import native_architectures, rewrites_transformers
from hybridengine.engines.train.fsdp.packing import packs
from hybridengine.validate.contradictions import validate
from hybridengine.validate.notes import model_notes
from hybridengine.validate.resolve import resolve

needs_vllm = pytest.mark.skipif(not native_architectures(), reason="needs vLLM to be installed")


def problems(path: Path, family: str, *overrides: str) -> str:
    config = config_for(path, FAMILIES[family], 1)
    if overrides:
        config = build([f"model.path={path}", "data.train=arithmetic", "reward.fn=exact_match",
                        "data.max_prompt_tokens=80", "rollout.max_tokens=16", *overrides])  # fmt: skip
    try:
        validate(config, World())
    except ConfigError as error:
        return str(error)
    return ""


@needs_vllm
@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("dynamic-rope", "rotary embeddings of type dynamic"),
        ("qwen2-own-head", "has a lm_head.weight that differs from model.embed_tokens.weight"),
        ("qwen2-max-window-layers", "max_window_layers=1 of 3 layers"),
        ("deepseek-v3", r"multi-head latent attention \(kv_lora_rank=32; heads of 48 for keys and 32 for values\)"),
        ("minicpm3", "multi-head latent attention"),
        ("cohere2", "sliding window of cohere2 is 32 in transformers and 33 in vLLM"),
        ("bloom", "exact GELU"),
        ("phimoe", "vLLM leaves out the bias of PhiMoE's output projection"),
        ("phimoe-renamed", "vLLM leaves out the bias of PhiMoE's output projection"),
        ("diffllama", "differential attention"),
        ("ernie4.5-moe", "correction bias of the router"),
        ("mpt", "vLLM has no implementation of MptForCausalLM"),
        ("lfm2", "layers of kind conv"),
        ("mamba2", "only decoders whose layers are all attention"),
        ("jamba", "only decoders whose layers are all attention"),
        ("falcon-h1", "only decoders whose layers are all attention"),
    ],
)
def test_refused_by_name(tmp_path: Path, family: str, told: str) -> None:
    assert re.search(told, problems(make_model(tmp_path / "m", FAMILIES[family]), family))


@needs_vllm
@pytest.mark.parametrize(
    "family",
    ["gemma2", "qwen2-yarn", "qwen2-yarn-scaled", "linear-rope", "phi3-longrope", "glm4-moe", "olmoe", "mixtral",
     "apertus", "granite", "cohere2-within-window", "stablelm", "nemotron", "arcee", "gpt-j"],
)  # fmt: skip
def test_what_runs_is_not_refused(tmp_path: Path, family: str) -> None:
    assert problems(make_model(tmp_path / "m", FAMILIES[family]), family) == ""


@needs_vllm
@pytest.mark.parametrize(
    ("family", "told"), [("bitnet", "normalises over a width"), ("gpt-oss", "has a bias of its experts")]
)
def test_one_rank_runs_what_ranks_cannot_share(tmp_path: Path, family: str, told: str) -> None:
    model = make_model(tmp_path / "m", FAMILIES[family])
    assert problems(model, family) == ""
    assert re.search(rf"rollout\.tp=2: \w+ {told}.*; rollout.tp=1 runs it", problems(model, family, "rollout.tp=2"))


def test_yarn_has_an_end(tmp_path: Path) -> None:
    """A factor of 4 on 64 tokens."""
    path = make_model(tmp_path / "m", FAMILIES["qwen2-yarn"])
    assert problems(path, "qwen2-yarn", "data.max_prompt_tokens=240") == ""
    assert "= 257: the model's context is 256 tokens" in problems(path, "qwen2-yarn", "data.max_prompt_tokens=241")


def test_an_equal_tied_head_is_kept_quietly(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FAMILIES["qwen2-tied"])
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert problems(path, "qwen2-tied") == ""
    tensors["lm_head.weight"][-1, -1] += 1e-3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert "has a lm_head.weight that differs" in problems(path, "qwen2-tied")


def changed(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen2", "arcee", "olmoe"])
def test_checkpoints_that_are_not_of_their_config(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path / "m", FAMILIES[family])
    changed(path, lambda t: t.update({"model.norm.weight": torch.ones(5)}))
    assert "model.norm.weight has shape (5,) in the checkpoint, (128,) by config.json" in problems(path, family)
    changed(path, lambda t: t.pop("model.norm.weight"))
    assert "1 parameters of" in (found := problems(path, family)) and "first: model.norm.weight" in found
    (path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors: has 0 bytes" in problems(path, family)


def test_quantized_checkpoints(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FAMILIES["qwen2"])
    content = json.loads((path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (path / "config.json").write_text(json.dumps(content))
    assert "is quantized (gptq)" in problems(path, "qwen2")


def test_experts_and_the_transformers_rollout_engine(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FAMILIES["olmoe"])
    assert "which the transformers rollout engine does not take" in problems(path, "olmoe", "rollout=transformers")


# -- where the engine runs, and what is said -------------------------------------------------------


@needs_vllm
def test_what_vllm_serves_through_transformers_gets_processes_of_its_own(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FAMILIES["arcee"])
    base = [f"model.path={path}", "data.train=arithmetic", "reward.fn=exact_match", "data.max_prompt_tokens=80",
            "rollout.max_tokens=16"]  # fmt: skip
    config = resolve(build(base))
    assert config.rollout.process == "separate"
    [note] = model_notes(config, path, max_model_len=96)
    assert "rollout.process=separate: vLLM runs ArceeForCausalLM through its Transformers backend" in note
    assert resolve(build([*base, "rollout=transformers"])).rollout.process == "auto"
    same = resolve(build([*base, "rollout.process=same"]))
    assert same.rollout.process == "same"
    with pytest.raises(ConfigError, match="leave rollout.process at auto"):
        validate(same, World())


@needs_vllm
def test_native_architectures() -> None:
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"} <= native_architectures()
    assert rewrites_transformers(["Olmo3ForCausalLM"]) and not rewrites_transformers(["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("family", "expected"),
    [("qwen2", True), ("nemotron", True), ("stablelm", True), ("phi3-longrope", True), ("gemma2", True),
     ("gpt2", True), ("gpt-j", False), ("falcon", False), ("bloom", False)],
)  # fmt: skip
def test_which_decoders_keep_packed_sequences_apart(tmp_path: Path, family: str, expected: bool) -> None:
    from transformers import AutoConfig

    path = make_model(tmp_path / "m", FAMILIES[family])
    assert packs(AutoConfig.from_pretrained(path)) == expected
    notes = "\n".join(model_notes(config_for(path, FAMILIES[family], 1), path, max_model_len=96))
    assert ("micro-batches are padded rows" in notes) != expected
    assert ("LongRoPE: long factors for every sequence" in notes) == (family == "phi3-longrope")
