"""Weights into an engine in processes of its own: bytes and time of a whole update, arms interleaved in one run.

    make bench-separate                                          # SGLang, SmolLM2-135M's shapes, 2 ranks, TP 1
    .venv/bin/python -m benchmarks.bench_separate --engine vllm --rounds 9

Arms, all from the same FSDP shards:

- inside     the pull into plain tensors of the rank's own process: no engine, no message
- separate   the pull into the memory that the engine's process shares
- update     `separate` with its bracket: begin_update, the pull, finish_update (caches reset, vLLM: packed again)
- own        SGLang's update_weights_from_tensor with its bracket, the full tensors being in its process already
- own-gather the same after a gloo all-gather of the shards, which it takes to have full tensors at all; bringing them
             into SGLang's process is still not counted

An arm's time is its slowest rank's; every ratio is a median over rounds of two arms of the same round. The engine's
memory is compared with the expected values, and its own byte sums with ours. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig

from benchmarks import reshard_arms as arms
from benchmarks.bench_reshard import MODELS, timed
from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.engine import RemoteEngine
from hybridengine.engines.rollout.remote.messages import Start
from hybridengine.engines.rollout.sglang.host import SGLangHost
from hybridengine.engines.rollout.sglang.traits import TRAITS as SGLANG
from hybridengine.placement.parts import rollout_shard_map
from hybridengine.report.summary import commit, versions
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming import canonical_params
from hybridengine.sync.plan.nesting import choose_fsdp_sharding
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.plan.spec import ParamSpec


class BenchHost(SGLangHost):
    """SGLang with one call more."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._full: list[tuple[str, torch.Tensor]] = []

    def layout(self, params: Mapping[str, ParamSpec]) -> Any:
        self._full = [(name, torch.ones(spec.shape)) for name, spec in params.items()]
        return super().layout(params)

    def own_update(self) -> None:
        engine = self._engine
        engine.begin_weight_update()
        success, message = engine.update_weights_from_tensor(self._full)[:2]
        engine.end_weight_update()
        if not success:
            raise RuntimeError(message)


TRAITS = replace(SGLANG, own_processes="benchmarks.bench_separate:BenchHost")

#: --engine -> rollout.engine.
ENGINES = {"sglang": "benchmarks.bench_separate:TRAITS", "vllm": "vllm"}


class Sink(arms.Tensors):
    """Takes full parameters and does nothing with them."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:
            pass


def measure(world: World, name: str, tp: int, model: Path, rounds: int) -> dict[str, Any]:
    """On every rank."""
    rollout = RolloutConfig(engine=ENGINES[name], process="separate", tp=tp, kv_cache_gib=0.125, max_num_seqs=8)
    engine = RemoteEngine(model, rollout, world=world, max_model_len=64)
    params = canonical_params(AutoConfig.from_pretrained(model), "float32")
    target = rollout_shard_map(engine, params)
    choice = choose_fsdp_sharding(params, target, tp=tp)
    source = fsdp_shard_map(params, world.size, dims=choice.dims, order=choice.order)
    plan = build_plan(source, target)
    shards = [arms.Tensors(source, world.rank) for _ in range(2)]  # a transfer keeps the shards that it has moved
    plain, shared = arms.Tensors(target, world.rank), arms.Tensors(target, world.rank)
    shared.tensors = engine.live_tensors()
    inside = arms.Pull(world, shards[0], plain, plan, verify=True)
    across = arms.Pull(world, shards[1], shared, plan, verify=True)

    def update() -> None:
        engine.begin_update()
        across.run()
        engine.finish_update(across.version)

    every = {"inside": inside.run, "separate": across.run, "update": update}
    if name == "sglang":
        gather = arms.Gather(world, shards[0], Sink(target, world.rank))

        def gathered() -> None:
            gather.run()
            engine._order("own_update")

        every |= {"own": lambda: engine._order("own_update"), "own-gather": gathered}
    seconds: dict[str, list[float]] = {arm: [] for arm in every}
    for turn in range(rounds + 1):
        for shard in shards:
            shard.fill(turn)
        for arm in list(every) if turn % 2 else reversed(list(every)):
            took = timed(every[arm])
            if turn:
                seconds[arm].append(took)
            if turn in (0, rounds) and not arm.startswith("own"):
                assert (plain if arm == "inside" else shared).holds(turn), arm
            if turn == 0 and arm.startswith("own"):
                assert all(bool((tensor[0] == 1).all()) for tensor in shared.tensors.values())
    update()
    ours = {n: int(t.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for n, t in shared.tensors.items()}
    theirs = engine.checksums()
    assert all(theirs[n] == total for n, total in ours.items())
    report = across.report
    assert report is not None
    engine.close()
    return {
        "seconds": seconds,
        "received": report.bytes_received,
        "minimum": report.bytes_minimum,
        "local": report.bytes_local,
        "held": shared.nbytes,
    }


def run_rank(rank: int, options: argparse.Namespace, directory: str) -> None:
    size = options.ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    results: list[Any] = [None] * size
    dist.all_gather_object(
        results, measure(world, options.engine, options.tp, Path(directory) / "model", options.rounds)
    )
    if rank == 0:
        worst = max(results, key=lambda result: result["received"]) | {"seconds": results[0]["seconds"]}
        Path(f"{directory}/result.json").write_text(json.dumps(worst))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), default="sglang")
    parser.add_argument("--model", choices=list(MODELS), default="smollm2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="bench-separate-") as directory:
        MODELS[options.model]().save_pretrained(f"{directory}/model")
        mp.spawn(run_rank, args=(options, directory), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        result = json.loads(Path(f"{directory}/result.json").read_text())
    seconds: dict[str, list[float]] = result.pop("seconds")

    def ratio(over: str, under: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True)), 3)

    line = {
        "benchmark": "separate",
        "case": f"{options.engine}-{options.model}-n{options.ranks}-tp{options.tp}",
        **result,
        "bytes_over_minimum": result["received"] / result["minimum"] if result["minimum"] else 1.0,
        "separate_over_inside": ratio("separate", "inside"),
        "update_over_inside": ratio("update", "inside"),
        "milliseconds": {arm: round(1e3 * statistics.median(times), 1) for arm, times in seconds.items()},
        **{f"{arm}_over_update": ratio(arm, "update") for arm in seconds if arm.startswith("own")},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **commit(),
        "versions": versions(),
    }
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
