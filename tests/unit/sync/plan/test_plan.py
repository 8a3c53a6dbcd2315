"""The planner against an oracle that knows only elements."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.layouts import chunk, fsdp_shard_map, replicated_shard_map
from hybridengine.sync.plan.naming import (
    MegatronLayout,
    canonical_params,
    megatron_shard_map,
    stored_tensors,
    vllm_table_map,
)
from hybridengine.sync.plan.nesting import choose_fsdp_sharding, nested_order, sharding_for
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice
from tests.unit.sync.plan.oracle import verify

BASE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16, "num_local_experts": 4}


def config(architecture: str, **overrides: Any) -> SimpleNamespace:
    return SimpleNamespace(architectures=[architecture], **{**BASE, **MOE, **overrides})


MODELS = {
    "llama": config("LlamaForCausalLM"),
    "qwen2-tied": config("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3-one-kv-head": config("Qwen3ForCausalLM", num_key_value_heads=1),
    "gemma2": config("Gemma2ForCausalLM", tie_word_embeddings=True),
    "qwen3-moe": config("Qwen3MoeForCausalLM", mlp_only_layers=[0]),
    "qwen2-moe": config("Qwen2MoeForCausalLM"),
    "mixtral": config("MixtralForCausalLM"),
}


def spec(name: str, *shape: int, dtype: str = "float32") -> dict[str, ParamSpec]:
    return {name: ParamSpec(name, shape, dtype)}


@pytest.mark.parametrize(
    ("world", "tp"),
    [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("model", MODELS)
def test_fsdp_to_vllm(model: str, world: int, tp: int) -> None:
    """Every element arrives, nothing is moved twice, both in rank order and in the chosen nesting."""
    hf, stored = MODELS[model], stored_tensors(MODELS[model])
    params, target = canonical_params(hf), vllm_table_map(hf, tp=tp, world_size=world)
    choice = choose_fsdp_sharding(params, target, tp=tp, stored=stored)
    plain = build_plan(fsdp_shard_map(params, world, stored=stored), target)
    nested = build_plan(fsdp_shard_map(params, world, stored=stored, order=choice.order, dims=choice.dims), target)
    verify(plain)
    verify(nested)
    assert choice.best.received == tuple(nested.received_bytes(rank) for rank in range(world))
    assert choice.candidates[0].received == tuple(plain.received_bytes(rank) for rank in range(world))
    assert nested.summary().received <= plain.summary().received


@pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")
@pytest.mark.parametrize(
    "layout",
    [
        MegatronLayout(tp=4, vocab_divisor=8),
        MegatronLayout(tp=2, pp=2, vocab_divisor=8),
        MegatronLayout(tp=2, dp=2, vocab_divisor=8),
        MegatronLayout(pp=2, dp=2, stages=(1, 0), vocab_divisor=8),
    ],
    ids=["tp4", "tp2-pp2", "tp2-dp2", "pp2-dp2-swapped"],
)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gemma2"])
def test_megatron_to_vllm(model: str, layout: MegatronLayout, tp: int) -> None:
    hf = MODELS[model]
    verify(build_plan(megatron_shard_map(hf, layout), vllm_table_map(hf, tp=tp, world_size=4)))


@pytest.mark.parametrize(
    "layout", [MegatronLayout(dp=4, ep=4), MegatronLayout(tp=2, dp=2, ep=2)], ids=["ep4", "tp2-ep2"]
)
@pytest.mark.parametrize("model", ["qwen3-moe", "mixtral"])
def test_megatron_experts_to_vllm(model: str, layout: MegatronLayout) -> None:
    """Expert parallel on the training side, experts cut by TP on the other."""
    hf = MODELS[model]
    verify(build_plan(megatron_shard_map(hf, layout), vllm_table_map(hf, tp=2, world_size=4)))


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_same_tensor_parallel_size_moves_nothing(model: str) -> None:
    hf = MODELS[model]
    source = megatron_shard_map(hf, MegatronLayout(tp=2, vocab_divisor=32), dtype="bfloat16")
    plan = build_plan(source, vllm_table_map(hf, tp=2, world_size=2))
    verify(plan)
    assert plan.summary().received == 0


def test_tied_copy_on_the_last_stage() -> None:
    """Both ends of a pipeline hold the embedding; each element then has two holders."""
    layout = megatron_shard_map(MODELS["qwen2-tied"], MegatronLayout(pp=2, vocab_divisor=8))
    assert layout.multiplicity("model.embed_tokens.weight") == 2
    assert {item.tensor for item in layout.ranks[1] if "embed" in item.param} == {"output_layer.weight"}


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (MegatronLayout(tp=3), "4 attention heads are not divisible by tp=3"),
        (MegatronLayout(pp=3), "2 layers are not divisible by pipeline size 3"),
        (MegatronLayout(dp=4, ep=3), "4 experts are not divisible by ep=3"),
        (MegatronLayout(dp=3, ep=2), "ep=2 does not divide dp=3"),
    ],
    ids=["heads", "stages", "experts", "expert-ranks"],
)
def test_megatron_layouts_that_do_not_fit(layout: MegatronLayout, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        megatron_shard_map(MODELS["qwen3-moe"], layout)


# --- random layouts ---------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, world: int, params: dict[str, ParamSpec]) -> ShardMap:
    """Cut each parameter by a random grid; give every cell to one or more ranks, in shuffled local memory."""
    ranks: list[list[TensorSlice]] = [[] for _ in range(world)]
    used: dict[tuple[int, str], int] = {}
    for name, param in params.items():
        cells: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for extent in param.shape:
            cuts = sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=3))})
            cells = [
                ((*offsets, low), (*sizes, high - low))
                for offsets, sizes in cells
                for low, high in zip(cuts, cuts[1:], strict=False)
            ]
        for offsets, sizes in cells:
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                tensor = draw(st.sampled_from([name, "shared"]))
                axes = draw(st.permutations(range(len(sizes))))
                inner = contiguous_strides([sizes[axis] for axis in axes])
                strides = tuple(inner[axes.index(dim)] for dim in range(len(sizes)))
                start = used.get((rank, tensor), 0) + draw(st.integers(0, 2))
                used[rank, tensor] = start + int(np.prod(sizes))
                ranks[rank].append(TensorSlice(name, offsets, sizes, tensor, start, strides))
    dtype = {name: draw(st.sampled_from(["float32", "bfloat16"])) for name in params}
    return ShardMap(params, ranks, dtype).validate()


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[ShardMap, ShardMap]:
    world = draw(st.integers(1, 4))
    params: dict[str, ParamSpec] = {}
    for name in "ab"[: draw(st.integers(1, 2))]:
        params |= spec(name, *draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    return draw(layouts(world, params)), draw(layouts(world, params))


@given(layout_pairs())
@settings(max_examples=150, deadline=None)
def test_random_layouts(pair: tuple[ShardMap, ShardMap]) -> None:
    verify(build_plan(*pair))


def test_overlapping_source_boxes() -> None:
    """Rank 1 needs rows 0..9; it holds 3..5, others hold 0..6 and 4..9: it must read 0..2 and 6..9 only."""
    a = spec("w", 10, 2)

    def rows(low: int, high: int) -> TensorSlice:
        return TensorSlice("w", (low, 0), (high - low, 2), "w", 0, (2, 1))

    source = ShardMap(a, [[rows(0, 7)], [rows(3, 6)], [rows(4, 10)]], {"w": "float32"})
    target = ShardMap(a, [[], [rows(0, 10)], []], {"w": "bfloat16"})
    plan = build_plan(source, target)
    verify(plan)
    assert plan.received_bytes(1) == 7 * 2 * 2


# --- uneven shards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [(10, 4, [3, 3, 3, 1]), (5, 2, [3, 2]), (2, 4, [1, 1, 0, 0]), (9, 8, [2, 2, 2, 2, 1, 0, 0, 0])],
    ids=["10-on-4", "5-on-2", "fewer-rows-than-ranks", "9-on-8"],
)
def test_uneven_rows(rows: int, ranks: int, expected: list[int]) -> None:
    assert [chunk(rows, ranks, i)[1] for i in range(ranks)] == expected
    params = spec("w", rows, 2)
    source = fsdp_shard_map(params, ranks)
    assert [sum(item.sizes[0] for item in source.ranks[r]) for r in range(ranks)] == expected
    verify(build_plan(source, replicated_shard_map(params, ranks)))


def test_column_shards_are_contiguous_local_tensors() -> None:
    layout = fsdp_shard_map(spec("w", 4, 6), 2, dims={"w": 1}, order=(1, 0))
    assert layout.ranks[0][0] == TensorSlice("w", (0, 3), (4, 3), "w", 0, (3, 1))


def test_uneven_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="w: FSDP shards dimension 1 only evenly.*7.*divisible by 2"):
        fsdp_shard_map(spec("w", 4, 7), 2, dims={"w": 1})


def test_bad_order_is_refused() -> None:
    with pytest.raises(ValueError, match="not a permutation"):
        fsdp_shard_map(spec("w", 4, 6), 2, order=(0, 0))


# --- sources, digests, refusals ----------------------------------------------------------------------------


def test_sources_are_balanced() -> None:
    """Two halves held by three ranks each; all six ranks want the other half: each holder serves one reader."""
    params = {f"{i}": ParamSpec(f"{i}", (6, 4), "float32") for i in range(10)}
    halves = [[TensorSlice(name, (3 * (r % 2), 0), (3, 4), name, 0, (4, 1)) for name in params] for r in range(6)]
    plan = build_plan(ShardMap(params, halves, dict.fromkeys(params, "float32")), replicated_shard_map(params, 6))
    assert {plan.sent_bytes(rank) for rank in range(6)} == {10 * 3 * 4 * 4}


def test_repeated_layers_take_turns() -> None:
    """Five readers and two holders of the same bytes: over all layers both send the same."""
    params = {f"{i}": ParamSpec(f"{i}", (8,), "float32") for i in range(16)}
    whole = {name: TensorSlice(name, (0,), (8,), name, 0, (1,)) for name in params}
    source = ShardMap(
        params, [list(whole.values()) if r < 2 else [] for r in range(7)], dict.fromkeys(params, "float32")
    )
    plan = build_plan(source, replicated_shard_map(params, 7))
    assert plan.sent_bytes(0) == plan.sent_bytes(1) == 16 * 5 * 32 // 2


def test_own_node_is_preferred() -> None:
    params = spec("w", 8)
    whole = [TensorSlice("w", (0,), (8,), "w", 0, (1,))]
    source = ShardMap(params, [whole, [], whole, []], {"w": "float32"})
    plan = build_plan(source, replicated_shard_map(params, 4), node_of=(0, 0, 1, 1))
    assert [plan.copies(rank)[0].source_rank for rank in range(4)] == [0, 0, 2, 2]


def test_digest_is_the_layout() -> None:
    """Equal however it was built; different after any change."""
    params = spec("w", 8, 2) | spec("b", 8)
    layout = fsdp_shard_map(params, 4)
    written_out = ShardMap(params, list(layout.ranks), layout.dtype)
    assert written_out == layout and len({layout, written_out}) == 1
    others = [
        fsdp_shard_map(params, 4, order=(1, 0, 2, 3)),
        fsdp_shard_map(params, 4, dtype="bfloat16"),
        fsdp_shard_map(params, 8),
        fsdp_shard_map(spec("w", 8, 2) | spec("c", 8), 4),
    ]
    assert all(other != layout for other in others)


def test_other_models_are_refused_in_one_message() -> None:
    a = spec("same", 4) | spec("only.trained", 4) | spec("grown", 4, 2)
    b = spec("same", 4) | spec("only.served", 4) | spec("grown", 5, 2)
    with pytest.raises(ValueError) as error:
        build_plan(replicated_shard_map(a, 2), replicated_shard_map(b, 1))
    for told in ("2 ranks", "only.trained", "only.served", "grown ([4, 2] in training, [5, 2] in rollout)"):
        assert told in str(error.value)


def test_elements_nobody_trains_are_refused() -> None:
    params = spec("w", 8)
    source = ShardMap(params, [[TensorSlice("w", (0,), (5,), "w", 0, (1,))]], {"w": "float32"})
    with pytest.raises(ValueError, match="w: part of the .* held by no rank"):
        source.validate()
    with pytest.raises(ValueError, match="w: elements .* held by no source rank"):
        build_plan(source, replicated_shard_map(params, 1))


@pytest.mark.parametrize(
    "bad",
    [
        TensorSlice("w", (6,), (4,), "w", 0, (1,)),
        TensorSlice("w", (-1,), (9,), "w", 0, (1,)),
        TensorSlice("w", (0,), (0,), "w", 0, (1,)),
        TensorSlice("w", (0, 0), (8, 1), "w", 0, (1, 1)),
        TensorSlice("w", (0,), (8,), "w", -1, (1,)),
    ],
    ids=["past-the-end", "before-the-start", "empty", "too-many-dimensions", "negative-address"],
)
def test_bad_boxes_are_refused(bad: TensorSlice) -> None:
    full = TensorSlice("w", (0,), (8,), "w", 0, (1,))
    with pytest.raises(ValueError, match="^w: rank 0"):
        ShardMap(spec("w", 8), [[bad, full]], {"w": "float32"}).validate()


def test_multiplicity() -> None:
    params = spec("w", 8)
    low, high = (TensorSlice("w", (o,), (4,), "w", 0, (1,)) for o in (0, 4))
    assert replicated_shard_map(params, 3).multiplicity("w") == 3
    assert fsdp_shard_map(params, 4).multiplicity("w") == 1
    assert ShardMap(params, [[low], [high], [low]], {"w": "float32"}).multiplicity("w") is None


# --- nesting -----------------------------------------------------------------------------------------------


def test_nested_order() -> None:
    """s(r) = (r mod t) * (N / t) + floor(r / t), inverted."""
    for world, tp in ((8, 2), (8, 4), (6, 3), (4, 4), (4, 1)):
        order = nested_order(world, tp)
        assert [order.index(r) for r in range(world)] == [(r % tp) * (world // tp) + r // tp for r in range(world)]


QWEN25_7B = config(
    "Qwen2ForCausalLM",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=152064,
)


@pytest.mark.parametrize(("tp", "best", "plain"), [(2, 5.712, 7.333), (4, 1.904, 3.667)], ids=["tp2", "tp4"])
def test_qwen25_7b_on_8_ranks(tp: int, best: float, plain: float) -> None:
    """7,615,616,512 bf16 parameters, 15.23 GB. A rank needs 1/t and holds 1/8 of it:
    (1/2 - 1/8) * 15.23 = 5.71 GB and (1/4 - 1/8) * 15.23 = 1.90 GB; a full gather brings 7/8 * 15.23 = 13.33 GB.
    """
    params, target = canonical_params(QWEN25_7B), vllm_table_map(QWEN25_7B, tp=tp, world_size=8)
    assert sum(param.numel for param in params.values()) == 7_615_616_512
    choice = sharding_for(QWEN25_7B, world_size=8, tp=tp)
    assert choice.best.name == "nested order, best dimensions"
    assert {name.split(".")[-2] for name in choice.dims} == {"o_proj", "down_proj"}
    plan = build_plan(fsdp_shard_map(params, 8, order=choice.order, dims=choice.dims), target)
    summary = plan.summary()
    assert round(summary.received / 1e9, 3) == best and summary.received == summary.minimum
    assert round(choice.candidates[0].per_rank / 1e9, 3) == plain
    assert round(summary.gather / 1e9, 2) == round(choice.gather_bytes / 1e9, 2) == 13.33
    assert len({plan.sent_bytes(rank) for rank in range(8)}) == 1


def test_moves_are_few() -> None:
    """FSDP-8 to TP2 nested: each rank reads one box per weight from itself and each of three others."""
    params, target = canonical_params(QWEN25_7B), vllm_table_map(QWEN25_7B, tp=2, world_size=8)
    choice = choose_fsdp_sharding(params, target, tp=2)
    copies = build_plan(fsdp_shard_map(params, 8, order=choice.order, dims=choice.dims), target).copies(0)
    # 7 matrices and the 3 biases of a layer come from 4 ranks, its 2 norms (cut 8 ways, needed whole) from 8
    assert len(copies) == 28 * (10 * 4 + 2 * 8) + 2 * 4 + 8


def test_planning_20_000_tensors_for_64_ranks() -> None:
    """All ranks' plans in under two seconds of processor time, and one rank's own copies written out as well."""
    hf = config(
        "Qwen3MoeForCausalLM",
        hidden_size=2048,
        num_hidden_layers=51,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_intermediate_size=768,
    )
    target = vllm_table_map(hf, tp=8, world_size=64)
    source = fsdp_shard_map(target.params, 64, stored=stored_tensors(hf), order=nested_order(64, 8))
    assert len(target.params) > 20_000
    start = time.process_time()
    plan = build_plan(source, target)
    plan.copies(5)
    seconds = time.process_time() - start
    assert plan.summary().received == plan.summary().minimum > 0
    assert seconds < 2.0, f"planning took {seconds:.2f} s"
