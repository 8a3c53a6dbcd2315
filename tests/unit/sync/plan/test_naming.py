"""The tables against the libraries they describe: transformers' checkpoints and models, Megatron's row orders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.sync.plan.layouts import replicated_shard_map
from hybridengine.sync.plan.naming import (
    MegatronLayout,
    canonical_params,
    decoder_of,
    describe_model,
    megatron_shard_map,
    stored_tensors,
    vllm_slices,
)
from hybridengine.sync.plan.spec import ShardMap

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "MistralForCausalLM", {}),
    "qwen2-tied": ("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "gemma": ("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [0]}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"num_local_experts": 4}),
}


@pytest.mark.parametrize("model", MODELS)
def test_transformers_model_and_checkpoint(tmp_path: Path, model: str) -> None:
    """Saving a model gives exactly the table's parameters, and each lies where ``stored_tensors`` says."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, architecture, overrides = MODELS[model]
    config = AutoConfig.for_model(kind, **{**BASE, **overrides})
    config.architectures = [architecture]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).float()
    made.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    live = dict(made.named_parameters())
    params, stored = describe_model(config, {name: tuple(tensor.shape) for name, tensor in live.items()})
    assert {name: spec.shape for name, spec in params.items()} == {n: tuple(t.shape) for n, t in checkpoint.items()}
    for item in replicated_shard_map(params, 1, stored=stored).ranks[0]:
        held = torch.as_strided(live[item.tensor], item.sizes, item.strides, item.start)
        assert torch.equal(held, checkpoint[item.param]), item


def config(architecture: str, **overrides: Any) -> SimpleNamespace:
    return SimpleNamespace(architectures=[architecture], **{**BASE, **EXPERTS, **overrides})


def test_a_model_unlike_its_table_is_refused() -> None:
    hf = config("LlamaForCausalLM")
    shapes = {tensor.name: tensor.shape for tensor in stored_tensors(hf)}
    shapes["model.norm.weight"] = (31,)
    shapes["model.extra"] = (2,)
    with pytest.raises(ValueError, match="model.extra: .*model.norm.weight: \\(31,\\) in the model"):
        describe_model(hf, shapes)


def test_models_without_a_table() -> None:
    """Plain tensors are taken as they are; stacked ones can't be guessed."""
    hf = SimpleNamespace(architectures=["StarForCausalLM"])
    params, stored = describe_model(hf, {"w": (4, 2)})
    assert params["w"].shape == (4, 2) and stored[0].name == "w"
    with pytest.raises(ValueError, match="no parameter table for architecture .*StarForCausalLM"):
        describe_model(hf, {"experts": (4, 2, 2)})


@pytest.mark.parametrize(
    ("overrides", "tp", "told"),
    [
        ({}, 3, "4 attention heads are not divisible"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 3, "2 KV heads and tensor-parallel size 3"),
        ({"intermediate_size": 50}, 4, "mlp.gate_proj.weight: 50 is not divisible by tensor-parallel size 4"),
    ],
    ids=["heads", "kv-heads", "mlp"],
)
def test_vllm_sizes_that_do_not_divide(overrides: dict[str, Any], tp: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        vllm_slices(config("LlamaForCausalLM", **overrides), tp=tp, rank=0)


# --- Megatron ----------------------------------------------------------------------------------------------


def local_tensors(layout: ShardMap, checkpoint: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Fill local tensors from the map (flat, as long as the last element reached)."""
    local: dict[str, torch.Tensor] = {}
    for item in layout.ranks[rank]:
        end = item.start + sum((n - 1) * s for n, s in zip(item.sizes, item.strides, strict=True)) + 1
        have = local.get(item.tensor, torch.zeros(0))
        if end > have.numel():
            have = torch.cat([have, torch.zeros(end - have.numel())])
        box = tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))
        torch.as_strided(have, item.sizes, item.strides, item.start).copy_(checkpoint[item.param][box])
        local[item.tensor] = have
    return local


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Megatron's order, said with reshapes: per KV group its query rows, then its k and v rows."""
    parts = [part.reshape(groups, part.shape[0] // groups, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=lambda n: f"kv{n}")
@pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda n: f"tp{n}")
def test_megatron_row_orders(tp: int, kv_heads: int) -> None:
    """Fused qkv (groups cut by TP when there are fewer of them), fc1 halves, columns, padded vocabulary."""
    hf = config("Qwen2ForCausalLM", num_key_value_heads=kv_heads)
    layout = megatron_shard_map(hf, MegatronLayout(tp=tp, vocab_divisor=16))
    checkpoint = {name: torch.randn(spec.shape) for name, spec in canonical_params(hf).items()}
    layer = "model.layers.1."
    for rank in range(tp):
        local = local_tensors(layout, checkpoint, rank)

        def held(name: str, local: dict[str, torch.Tensor] = local) -> torch.Tensor:
            return local[f"decoder.layers.1.{name}"]

        for kind in ("weight", "bias"):
            q, k, v = (checkpoint[f"{layer}self_attn.{which}_proj.{kind}"] for which in "qkv")
            assert torch.equal(
                held(f"self_attention.linear_qkv.{kind}"), fuse_qkv(q, k, v, kv_heads).chunk(tp)[rank].flatten()
            )
        gate, up = (checkpoint[f"{layer}mlp.{which}_proj.weight"].chunk(tp)[rank] for which in ("gate", "up"))
        assert torch.equal(held("mlp.linear_fc1.weight"), torch.cat([gate, up]).flatten())
        for name, tensor in (("self_attn.o_proj", "self_attention.linear_proj"), ("mlp.down_proj", "mlp.linear_fc2")):
            assert torch.equal(
                held(f"{tensor}.weight"), checkpoint[f"{layer}{name}.weight"].chunk(tp, dim=1)[rank].flatten()
            )
        padded = -(-67 // (16 * tp)) * 16 * tp
        vocab = torch.cat([checkpoint["lm_head.weight"], torch.zeros(padded - 67, 32)]).chunk(tp)[rank].flatten()
        head = local.get("output_layer.weight", torch.zeros(0))
        assert torch.equal(torch.cat([head, torch.zeros(vocab.numel() - head.numel())]), vocab)


def test_megatron_ranks_stages_and_experts() -> None:
    """TP fastest, then expert ranks, then stages: rank 5 of tp2-ep2-pp2 is (1, 0, 1)."""
    hf = config("Qwen3MoeForCausalLM")
    layout = MegatronLayout(tp=2, dp=2, ep=2, pp=2)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 5, 7)] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1),
    ]  # fmt: skip
    held = megatron_shard_map(hf, layout)
    on_7 = {(item.param, item.tensor) for item in held.ranks[7]}
    assert (
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    ) in on_7
    assert not any("layers.0." in param or "experts.1." in param or "embed" in param for param, _ in on_7)
    assert decoder_of(hf).num_layers == 2
