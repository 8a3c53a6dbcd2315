"""The baked map of real vLLM models: equal to the tables, and true when weights are really loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.sync.plan.bake import bake_vllm
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.plan.merge import RankLayout, merge_layouts
from hybridengine.sync.plan.naming import canonical_params, stored_tensors, vllm_slices, vllm_table_map
from hybridengine.sync.plan.spec import ParamSpec
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.engine

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,  # padded to 192: at TP 4 the last rank has padding only
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: test id -> (transformers model type, architecture, overrides)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama-biases": ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "MistralForCausalLM", {}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen2-tied": ("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 1}),
    "gemma": ("gemma", "GemmaForCausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [0]}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"num_local_experts": 4}),
}


def config_of(model: str) -> Any:
    from transformers import AutoConfig

    kind, architecture, overrides = MODELS[model]
    config = AutoConfig.for_model(kind, **{**BASE, **overrides})
    config.architectures = [architecture]
    return config


def numbered(params: dict[str, ParamSpec]) -> dict[str, torch.Tensor]:
    """A float32 checkpoint in which no two elements are equal (exact below 2^24)."""
    tensors, start = {}, 1
    for name, spec in params.items():
        tensors[name] = torch.arange(start, start + spec.numel, dtype=torch.float32).reshape(spec.shape)
        start += spec.numel
    assert start < 2**24
    return tensors


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 1), (4, 3)], ids=lambda n: str(n))
@pytest.mark.parametrize("model", MODELS)
def test_baked_map(tmp_path: Path, model: str, tp: int, rank: int) -> None:
    """Equal to the table; baking leaves the weights alone; loading numbers puts them where the map says."""
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of(model)
    params = canonical_params(config)
    with fake_ranks(tp, rank), torch.no_grad():
        engine = build_model(tmp_path, config, tp=tp)
        live = {name: parameter.data for name, parameter in engine.named_parameters()}
        for tensor in live.values():
            tensor.fill_(-1)
        slices = bake_vllm(engine, params, live)
        assert all(bool((tensor == -1).all()) for tensor in live.values())
        checkpoint = numbered(params)
        engine.load_weights(iter(checkpoint.items()))
    order = [item.param for item in slices]
    assert sorted(slices, key=str) == sorted(vllm_slices(config, tp=tp, rank=rank), key=str), order
    for item in slices:
        box = tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))
        loaded = live[item.tensor]
        held = torch.as_strided(loaded, item.sizes, item.strides, loaded.storage_offset() + item.start)
        assert torch.equal(held, checkpoint[item.param][box]), item
        held.fill_(0)
    assert not any(bool(tensor.any()) for tensor in live.values()), "the map misses elements that were loaded"


@pytest.mark.parametrize("rank", [0, 1], ids=lambda rank: f"rank{rank}")
def test_experts_stacked_as_transformers_stores_them(tmp_path: Path, rank: int) -> None:
    """The loader also takes [E, 2f, h] tensors; the map then describes those."""
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of("qwen3-moe")
    params = {tensor.name: ParamSpec(tensor.name, tensor.shape, "float32") for tensor in stored_tensors(config)}
    with fake_ranks(2, rank), torch.no_grad():
        engine = build_model(tmp_path, config, tp=2)
        live = {name: parameter.data for name, parameter in engine.named_parameters()}
        slices = bake_vllm(engine, params, live)
        checkpoint = numbered(params)
        engine.load_weights(iter(checkpoint.items()))
    for item in slices:
        box = tuple(slice(o, o + s) for o, s in zip(item.offsets, item.sizes, strict=True))
        held = torch.as_strided(live[item.tensor], item.sizes, item.strides, item.start)
        assert torch.equal(held, checkpoint[item.param][box]), item
        held.fill_(0)
    assert not any(bool(tensor.any()) for tensor in live.values())


def test_a_bfloat16_engine_and_large_indices(tmp_path: Path) -> None:
    """Row numbers far beyond bfloat16's 8 bits: nothing is stored in the engine's dtype. 0.15 M rows on meta."""
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of("qwen2")
    config.vocab_size = 152064
    params = canonical_params(config)
    with fake_ranks(2, 1):
        engine = build_model(tmp_path, config, tp=2, dtype="bfloat16", device="meta")
        slices = bake_vllm(engine, params, dict(engine.named_parameters()))
    head = next(item for item in slices if item.param == "lm_head.weight")
    assert head.offsets == (76032, 0) and head.sizes == (76032, 64)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p.pop("model.layers.1.self_attn.k_proj.weight"), "model.layers.1.self_attn.qkv_proj.weight"),
        (lambda p: p.pop("model.norm.weight"), "model.norm.weight"),
        (lambda p: p.update(extra=ParamSpec("extra", (2,), "float32")), "extra"),
        (
            lambda p: p.update({"model.norm.weight": ParamSpec("model.norm.weight", (65,), "float32")}),
            "failed at model.norm.weight",
        ),
    ],
    ids=["part-of-a-fused-tensor-missing", "missing", "unknown", "wrong-shape"],
)
def test_models_that_do_not_match(tmp_path: Path, change: Any, told: str) -> None:
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of("qwen2")
    params = canonical_params(config)
    change(params)
    with fake_ranks(1, 0):
        engine = build_model(tmp_path, config, tp=1)
        with pytest.raises(ValueError, match=told):
            bake_vllm(engine, params, dict(engine.named_parameters()))


def test_a_tied_copy_listed_as_a_parameter_is_refused(tmp_path: Path) -> None:
    from tests.engines.vllm_models import build_model, fake_ranks

    config = config_of("qwen2-tied")
    params = canonical_params(config)
    params["lm_head.weight"] = ParamSpec("lm_head.weight", (131, 64), "float32")
    with fake_ranks(1, 0):
        engine = build_model(tmp_path, config, tp=1)
        slices = bake_vllm(engine, params, dict(engine.named_parameters()))
    dtype = {item.tensor: "float32" for item in slices}
    with pytest.raises(ValueError, match="nowhere: \\['lm_head.weight'\\].*tied"):
        merge_layouts(params, [RankLayout.of(slices, dtype)])


def bake_in_group(world: World, directory: str, model: str, tp: int) -> tuple[str, str]:
    """On every rank of a real job: vLLM's own process groups, bake, gather. Returns (baked, table) digests."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from tests.engines.vllm_models import build_model

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world.size, world.rank, "env://", world.rank, "gloo")
        initialize_model_parallel(tensor_model_parallel_size=tp)
    config = config_of(model)
    params = canonical_params(config)
    engine = build_model(Path(directory) / str(world.rank), config, tp=tp)
    live = dict(engine.named_parameters())
    slices = bake_vllm(engine, params, live)
    layout = gather_shard_map(slices, params, {name: "float32" for name in live})
    return layout.digest, vllm_table_map(config, tp=tp, world_size=world.size, dtype="float32").digest


def test_gathered_over_a_real_tensor_parallel_group(tmp_path: Path) -> None:
    """Two ranks, one replica: both end with the same map, that of the table."""
    digests = [
        digest for pair in run_ranks(2, bake_in_group, str(tmp_path), "qwen3-moe", 2, timeout=240) for digest in pair
    ]
    assert len(digests) == 4 and len(set(digests)) == 1
