"""bench_device's measurement of a pull between two processes, over the stand-ins: its rows, not its times."""

from __future__ import annotations

from typing import Any

from benchmarks import bench_device
from benchmarks.bench_reshard import llama
from hybridengine.distributed.world import World
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming.vllm import vllm_table_map
from hybridengine.sync.plan.nesting import choose_fsdp_sharding
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from tests.cuda import standin
from tests.distributed.ranks import run_ranks


def small_plan(tp: int, dtype: str) -> ReshardPlan:
    config = llama(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=256, tie_word_embeddings=True,
    )  # fmt: skip
    target = vllm_table_map(config, tp=tp, world_size=2, dtype=dtype)
    choice = choose_fsdp_sharding(target.params, target, tp=tp)
    return build_plan(fsdp_shard_map(target.params, 2, dims=choice.dims, order=(0, 1), dtype="float32"), target)


def on_stand_in(world: World) -> list[dict[str, Any]]:
    standin.install()
    return [
        bench_device.measure_pull(world, small_plan(tp, dtype), f"{tp} {dtype} {leave}", 2, leave=leave)
        for tp, dtype, leave in ((1, "bfloat16", True), (2, "float32", False), (2, "bfloat16", False))
    ]


def test_rows_of_a_pull() -> None:
    for rows in run_ranks(2, on_stand_in, timeout=120):
        assert [row["what"] for row in rows] == ["1 bfloat16 True", "2 float32 False", "2 bfloat16 False"]
        assert all(row["over_floor"] > 0 and row["gb_per_second"] > 0 for row in rows)
        assert [row["bytes_over_minimum"] for row in rows] == [1.0, 1.0, 1.0]
