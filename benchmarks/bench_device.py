"""Weights on a GPU: the box copy against plain device copies, and a transfer between two processes over CUDA IPC.

    python -m benchmarks.bench_device                        # a CUDA torch and nvcc, no vLLM; one GPU, about a minute

- kernel: one launch for all boxes, on 1 GiB in one box and on the plan of a model from FSDP over two ranks to TP 2.
  Floor: ``Tensor.copy_`` of as many bytes (device to device), or, with a cast, ``Tensor.copy_`` between the dtypes.
- pull: two processes on the one GPU, each with half of the shards, into an engine of TP 1 or 2, with and without a
  cast, from the shards or (where training weights leave between syncs) through a staging ring: waits for words, IPC
  mappings and fingerprints included. Floor: a device copy of the bytes that the engine's tensors have. Aimed at: 1.25
  of it, with a cast 1.5.

Times are medians; ratios are of times taken in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks import reshard_arms as arms
from benchmarks.bench_reshard import llama
from hybridengine import native, native_cuda
from hybridengine.distributed.world import World
from hybridengine.report.summary import commit, versions
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming.vllm import vllm_table_map
from hybridengine.sync.plan.nesting import choose_fsdp_sharding
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.sync.transfer.base import TransferSettings
from hybridengine.sync.transfer.pull import PullTransfer
from hybridengine.sync.transfer.tables import TableBuilder

DEVICE = torch.device("cuda", 0)
RANKS = 2
DTYPES = ("float32", "bfloat16")


def model_plan(tp: int, dtype: str) -> ReshardPlan:
    """A Llama of 1.1 B parameters (4.4 GB of float32 shards) from FSDP over two ranks into vLLM's layout."""
    config = llama(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=64000, tie_word_embeddings=True,
    )  # fmt: skip
    target = vllm_table_map(config, tp=tp, world_size=RANKS, dtype=dtype)
    choice = choose_fsdp_sharding(target.params, target, tp=tp)
    source = fsdp_shard_map(target.params, RANKS, dims=choice.dims, order=(0, 1), dtype="float32")
    return build_plan(source, target)


def shards(layout: ShardMap, rank: int, device: torch.device) -> arms.Tensors:
    """Random training shards of a rank."""
    held = arms.Tensors(layout, rank, device)
    for tensor in held.tensors.values():
        tensor.normal_()
    return held


def seconds(work: Callable[[], Any], floor: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Medians of both, taken in turn, on the GPU's own clock."""
    found: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds + 2):
        for times, call in zip(found, (work, floor), strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            if index >= 2:
                times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[0]), statistics.median(found[1])


def one_box(source: torch.Tensor, target: torch.Tensor, slot: int) -> np.ndarray:
    boxes = native.new_boxes(1)
    row = boxes[0]
    row["src"], row["dst"], row["op"] = source.data_ptr(), target.data_ptr(), native.copy_op(source.dtype, target.dtype)
    row["slot"] = (slot, -1)
    native.set_dims(row, source.shape, source.stride(), target.stride(), source.stride())
    return boxes


def kernel(rounds: int) -> list[dict[str, Any]]:
    return [found for dtype in DTYPES for found in (*large_box(dtype, rounds), own_slices(dtype, rounds))]


def large_box(dtype: str, rounds: int) -> list[dict[str, Any]]:
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty(1 << 28, dtype=getattr(torch, dtype), device=DEVICE)
    sums = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rows = []
    for label, slot in (("", -1), (", summed", 0)):
        boxes = one_box(source, target, slot)
        run = partial(native_cuda.run_boxes, boxes, sums, DEVICE)
        ours, floor = seconds(run, partial(target.copy_, source), rounds)
        rows.append(row(f"1 GiB float32 to {dtype}{label}", ours, floor, source.nbytes + target.nbytes))
    return rows


def own_slices(dtype: str, rounds: int) -> dict[str, Any]:
    """What rank 0 copies from its own shards."""
    plan = model_plan(2, dtype)
    train, rollout = shards(plan.source, 0, DEVICE), arms.Tensors(plan.target, 0, DEVICE)
    builder = TableBuilder(None, DEVICE)
    for copy in plan.copies(0):
        if copy.is_local:
            builder.copy(copy, train.tensors)
    table = builder.build()
    table.aim(rollout.tensors, train.tensors)
    count = table.nbytes // getattr(torch, dtype).itemsize
    a, b = torch.randn(count, device=DEVICE), torch.empty(count, dtype=getattr(torch, dtype), device=DEVICE)
    ours, floor = seconds(lambda: table.run(None), lambda: b.copy_(a), rounds)
    return row(f"own slices of a 1.1 B plan, TP 2, to {dtype}", ours, floor, a.nbytes + b.nbytes)


def row(what: str, ours: float, floor: float, moved: int) -> dict[str, Any]:
    """``moved``: bytes read and written."""
    return {"what": what, "seconds": ours, "over_floor": ours / floor, "gb_per_second": moved / ours / 1e9}


def measure_pull(world: World, plan: ReshardPlan, what: str, rounds: int, *, leave: bool) -> dict[str, Any]:
    """Both ranks of a plan on ``world.device``: a pull and, in turn, a plain copy of the engine's bytes; the slower
    rank counts.

    Args:
        leave: training weights leave between syncs, so that peers read a staging ring instead of the shards.
    """
    device = world.device
    train, rollout = shards(plan.source, world.rank, device), arms.Tensors(plan.target, world.rank, device)
    transfer = PullTransfer(train, rollout, plan, TransferSettings(world=world, weights_leave=leave))
    a = torch.empty(rollout.nbytes, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times: dict[str, list[float]] = {"pull": [], "floor": []}
    for version in range(rounds + 3):
        for name in times:
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            if name == "pull":
                report = transfer.run(version)
            else:
                b.copy_(a)
            torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if version >= 3:  # the first one is checked in full, the second finds the allocator warm
                times[name].append(float(slowest))
    transfer.close()
    dist.barrier()
    pull, floor = statistics.median(times["pull"]), statistics.median(times["floor"])
    return row(what, pull, floor, 2 * rollout.nbytes) | {
        "bytes_over_minimum": report.bytes_received / max(1, report.bytes_minimum)
    }


def pull_rank(rank: int, directory: str, tp: int, dtype: str, leave: bool, rounds: int, results: Any) -> None:
    torch.cuda.set_device(DEVICE)
    store = dist.FileStore(os.path.join(directory, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = replace(World(rank=rank, size=RANKS, local_rank=0, local_size=RANKS), device=DEVICE)
    what = f"pull between two processes, TP {tp}, float32 to {dtype}{', staged' if leave else ''}"
    found = measure_pull(world, model_plan(tp, dtype), what, rounds, leave=leave)
    if rank == 0:
        results.put(found)


def pulls(rounds: int) -> list[dict[str, Any]]:
    rows = []
    context = mp.get_context("spawn")
    for tp, dtype, leave in product((1, 2), DTYPES, (False, True)):
        results = context.Queue()
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(pull_rank, args=(directory, tp, dtype, leave, rounds, results), nprocs=RANKS)
        rows.append(results.get())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("bench_device needs a CUDA GPU; for CPU weights see bench_reshard")
    native_cuda.build()
    rows = [*kernel(arguments.rounds), *pulls(arguments.rounds)]
    table = Table("what", "ms", "over floor", "GB/s read + written", title=torch.cuda.get_device_name(DEVICE))
    for found in rows:
        table.add_row(
            found["what"],
            f"{found['seconds'] * 1e3:.2f}",
            f"{found['over_floor']:.2f}",
            f"{found['gb_per_second']:.0f}",
        )
    Console(width=120).print(table)
    print(json.dumps({"device": torch.cuda.get_device_name(DEVICE), "rows": rows, **commit(), "versions": versions()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
