"""Training layout to inference layout: bytes, memory and time of a weight transfer, arms interleaved in one run.

    make bench-reshard                                       # default: SmolLM2-135M, two small models, 2 ranks
    .venv/bin/python -m benchmarks.bench_reshard --full      # N x TP x {dense, MoE} x {float32, float32->bf16}
    .venv/bin/python -m benchmarks.bench_reshard --cases smollm2-n2-tp1-float32 --rounds 9

Arms, on the same tensors (see reshard_arms.py):

- floor       memcpy of as many bytes as the engine's tensors have, from private memory
- cast        one local pass over as many elements by our box copy, cast included, nothing moved between ranks; what a
              pull with a cast can reach without sharing work. `torch-cast`: the same by torch's ``copy_``
- pull        ours, fingerprints included; `unverified` is the same without them
- gather      gloo all-gather of every parameter in full, then vLLM's own load_weights
- shm-full    the whole model assembled in shared memory once per node, then load_weights from there
- shm-bucket  the same through two 64 MiB buffers

An arm's time is that of its slowest rank; every ratio is a median over rounds of two arms of the same round, so
that a machine that slows down slows down both. Times mean something for N up to the number of cores; bytes and
memory for any N. All arms end with the engine's values checked. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks import reshard_arms as arms
from hybridengine import native
from hybridengine.distributed.world import World
from hybridengine.report.summary import commit, versions
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming.huggingface import stored_tensors
from hybridengine.sync.plan.naming.megatron import MegatronLayout, megatron_shard_map
from hybridengine.sync.plan.naming.vllm import tensor_parallel_fits, vllm_table_map
from hybridengine.sync.plan.nesting import choose_fsdp_sharding, nested_order
from hybridengine.sync.plan.plan import ReshardPlan, build_plan

ROOT = Path(__file__).resolve().parent.parent


def llama(**values: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(architectures=["LlamaForCausalLM"], **values)


def qwen3_moe(**values: Any) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False, **values)


MODELS: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: llama(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "dense": lambda: llama(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536,
        vocab_size=16384, tie_word_embeddings=False,
    ),
    "moe": lambda: qwen3_moe(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        vocab_size=8192, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=256, intermediate_size=512,
    ),
}  # fmt: skip

#: Of the engine; shards are float32.
DTYPES = ("float32", "bfloat16")
#: Arms that bring no weights.
FLOORS = ("floor", "cast", "torch-cast")
MAIN_CASE = "smollm2-n2-tp1-float32"
DEFAULT_CASES = (
    MAIN_CASE, "smollm2-n2-tp1-bfloat16", "dense-n2-tp2-float32", "dense-pp2-tp2-float32", "dense-pp2-tp2-bfloat16",
    "moe-n2-tp2-float32",
)  # fmt: skip


@dataclass(slots=True)
class Case:
    """Name: model-nN-tpT-dtype (FSDP2 over N ranks) or model-ppP-tpT-dtype (Megatron, P pipeline stages of one rank).

    Float32 shards, an engine of ``dtype``.
    """

    model: str
    kind: str
    ranks: int
    tp: int
    dtype: str

    @classmethod
    def parse(cls, name: str) -> Case:
        found = re.fullmatch(r"(\w+)-(n|pp)(\d+)-tp(\d+)-(\w+)", name)
        if found is None or found[1] not in MODELS:
            raise ValueError(f"{name!r} is not model-nN-tpT-dtype or model-ppP-tpT-dtype, model in {sorted(MODELS)}")
        case = cls(found[1], found[2], int(found[3]), int(found[4]), found[5])
        if problem := case.problem():
            raise ValueError(f"{name!r}: {problem}")
        return case

    def problem(self) -> str | None:
        """What can't be measured, found without a plan."""
        config = MODELS[self.model]()
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        if self.dtype not in DTYPES:
            return f"an engine's dtype is one of {', '.join(DTYPES)}, not {self.dtype}"
        if self.ranks < 1 or self.tp < 1 or self.ranks % self.tp:
            return f"tp{self.tp} must divide the {self.ranks} rank(s)"
        if not tensor_parallel_fits(config, self.tp):
            fits = [tp for tp in range(1, heads + 1) if tensor_parallel_fits(config, tp)]
            return f"tp{self.tp} must divide heads and widths of {self.model}; possible: {fits}"
        if self.kind == "pp" and layers % self.ranks:
            return f"pp{self.ranks} must divide the {layers} layers of {self.model}"
        return None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kind}{self.ranks}-tp{self.tp}-{self.dtype}"

    def plan(self) -> ReshardPlan:
        config = MODELS[self.model]()
        target = vllm_table_map(config, tp=self.tp, world_size=self.ranks, dtype=self.dtype)
        if self.kind == "pp":
            return build_plan(megatron_shard_map(config, MegatronLayout(pp=self.ranks)), target)
        choice = choose_fsdp_sharding(target.params, target, tp=self.tp)
        source = fsdp_shard_map(target.params, self.ranks, dims=choice.dims, order=choice.order, dtype="float32")
        return build_plan(source, target)


@dataclass(slots=True)
class Result:
    """One case. Bytes per rank; times: per arm and round, the slowest rank's seconds."""

    case: str
    received: int = 0
    minimum: int = 0
    held: int = 0
    extra_bytes: int = 0
    staging_bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, over: str, under: str) -> float:
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def summary(self) -> dict[str, float]:
        return {
            # Nothing to receive is as good as receiving the minimum.
            "bytes_over_minimum": self.received / self.minimum if self.minimum else 1.0 + self.received,
            "extra_bytes": self.extra_bytes,
            "staging_bytes": self.staging_bytes,
            "time_over_memcpy": self.ratio("pull", "floor"),
            "cast_over_memcpy": self.ratio("cast", "floor"),
            "torch_cast_over_memcpy": self.ratio("torch-cast", "floor"),
            "time_over_cast": self.ratio("pull", "cast"),
            "speedup_over_gather": self.ratio("gather", "pull"),
            "speedup_over_shm_full": self.ratio("shm-full", "pull"),
            "speedup_over_shm_bucket": self.ratio("shm-bucket", "pull"),
            "fingerprint_fraction": max(0.0, 1 - self.ratio("unverified", "pull")),
            "pull_seconds": statistics.median(self.seconds["pull"]),
        }


# ----------------------------------------------------------------------------------------------------------
# On every rank


def measure(world: World, case: Case, rounds: int) -> Result:
    """All arms on one engine; the arm without fingerprints has its own copy of the shards, since a transfer keeps
    the shards it has moved into shared memory."""
    plan = case.plan()
    train = arms.Tensors(plan.source, world.rank)
    rollout: arms.Tensors
    if uses_vllm(world.size):
        hf_config = MODELS[case.model]()
        rollout = arms.VLLMTensors(plan.target, world.rank, hf_config, tp=case.tp, dtype=case.dtype)
    else:
        rollout = arms.Tensors(plan.target, world.rank)
    train.fill(0)
    for tensor in rollout.tensors.values():
        tensor.fill_(-1)  # touched: zero pages would count as memory that the transfer takes
    before = arms.node_memory()
    pull = arms.Pull(world, train, rollout, plan, verify=True)
    pull.run()
    extra = (arms.node_memory() - before) // world.size
    twin = arms.Tensors(plan.source, world.rank)
    source = torch.ones(sum(tensor.numel() for tensor in rollout.tensors.values()))
    every: dict[str, Any] = {
        "floor": arms.Floor(rollout),
        "cast": arms.Cast(rollout, source, by_torch=False),
        "torch-cast": arms.Cast(rollout, source, by_torch=True),
        "pull": pull,
        "unverified": arms.Pull(world, twin, rollout, plan, verify=False),
        "gather": arms.Gather(world, train, rollout),
        "shm-full": arms.SharedAssembly(world, train, rollout, bucket=None),
        "shm-bucket": arms.SharedAssembly(world, train, rollout, bucket=arms.BUCKET_BYTES),
    }
    result = Result(case.name, held=rollout.nbytes, minimum=plan.minimum_bytes(world.rank), extra_bytes=max(0, extra))
    result.seconds = {name: [] for name in every}
    for turn in range(rounds + 1):
        train.fill(turn)
        twin.fill(turn)
        for name in list(every) if turn % 2 else reversed(every):
            seconds = timed(every[name].run)
            if turn:  # round 0 faults pages in
                result.seconds[name].append(seconds)
            if name not in FLOORS and turn in (0, rounds):
                assert rollout.holds(turn), (case.name, name)
    assert pull.report is not None
    result.received, result.staging_bytes = pull.report.bytes_received, pull.report.extra_bytes
    return result


def uses_vllm(ranks: int) -> bool:
    """More ranks than cores are for bytes and memory; they do not start that many vLLMs."""
    return ranks <= (os.cpu_count() or 1) and importlib.util.find_spec("vllm") is not None


def timed(run: arms.Run) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run_rank(rank: int, case: Case, rounds: int, directory: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), case.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=120))
    world = World(rank=rank, size=case.ranks, local_rank=rank, local_size=case.ranks)
    results: list[Any] = [None] * case.ranks
    dist.all_gather_object(results, measure(world, case, rounds))
    if rank == 0:
        # Rank 0's times are already the slowest rank's; bytes are those of the rank that receives most.
        worst = max(results, key=lambda r: r.received)
        worst.seconds = results[0].seconds
        (Path(directory) / "result.json").write_text(json.dumps(asdict(worst)))
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------
# Planning, reporting


def plan_seconds() -> tuple[float, int]:
    """Processor seconds to plan a mixture-of-experts model of over 20,000 tensors from FSDP-64 to 8 replicas of TP8."""
    big = qwen3_moe(
        hidden_size=2048, num_hidden_layers=52, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, num_experts=128, moe_intermediate_size=768, intermediate_size=6144,
    )  # fmt: skip
    target = vllm_table_map(big, tp=8, world_size=64)
    source = fsdp_shard_map(target.params, 64, stored=stored_tensors(big), order=nested_order(64, 8))
    begin = time.process_time()
    build_plan(source, target).copies(5)
    return time.process_time() - begin, len(target.params)


def run_case(case: Case, rounds: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-reshard-") as directory:
        mp.spawn(run_rank, args=(case, rounds, directory), nprocs=case.ranks)  # type: ignore[no-untyped-call]
        return Result(**json.loads((Path(directory) / "result.json").read_text()))


def report(results: list[Result], console: Console) -> None:
    table = Table(title="train layout → inference layout; times are ratios within one round, medians")
    for head in ("case", "received MB", "/ minimum", "extra MB/rank", "pull ms", "/ memcpy", "cast / memcpy",
                 "gather /", "shm-full /", "shm-bucket /", "fingerprint"):  # fmt: skip
        table.add_column(head, justify="left" if head == "case" else "right", no_wrap=True)
    for result in results:
        s = result.summary()
        table.add_row(
            result.case,
            f"{result.received / 1e6:.1f}",
            f"{s['bytes_over_minimum']:.2f}",
            f"{s['extra_bytes'] / 1e6:.1f}",
            f"{s['pull_seconds'] * 1e3:.1f}",
            f"{s['time_over_memcpy']:.2f}",
            f"{s['cast_over_memcpy']:.2f}",
            f"{s['speedup_over_gather']:.1f}×",
            f"{s['speedup_over_shm_full']:.1f}×",
            f"{s['speedup_over_shm_bucket']:.1f}×",
            f"{s['fingerprint_fraction']:.0%}",
        )
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """``cases`` are Cases, each looked at before the first is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", default=list(DEFAULT_CASES),
        help=f"model-nN-tpT-dtype (FSDP2 over N ranks) or model-ppP-tpT-dtype (Megatron, P stages); model: "
        f"{', '.join(MODELS)}; dtype of the engine: {', '.join(DTYPES)}; default: {' '.join(DEFAULT_CASES)}",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="all of N in 2, 4, 8 x TP in 1, 2, 4 on the small models")
    parser.add_argument("--rounds", type=int, default=5, help="times that every arm of a case is measured; default: 5")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be 1 or more")
    try:
        options.cases = [Case.parse(name) for name in (full_cases() if options.full else options.cases)]
    except ValueError as error:
        parser.error(f"--cases {error}")
    return options


def full_cases() -> list[str]:
    return [MAIN_CASE] + [
        f"{model}-n{n}-tp{tp}-{dtype}"
        for model in ("dense", "moe")
        for n in (2, 4, 8)
        for tp in (1, 2, 4)
        if tp <= n
        for dtype in DTYPES
    ]


def main() -> int:
    options = parse()
    console = Console(stderr=True, highlight=False, width=180)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    results = []
    for case in options.cases:
        results.append(run_case(case, options.rounds))
        console.print(f"{case.name} done", style="dim")
    seconds, count = plan_seconds()
    report(results, console)
    console.print(f"planning {count} tensors for 64 ranks: {seconds:.2f} s of processor time")
    main_result = results[0].summary()
    line = {
        "benchmark": "reshard",
        "case": results[0].case,
        **{key: round(value, 4) for key, value in main_result.items()},
        "plan_seconds_20k": round(seconds, 3),
        "cases": {r.case: {key: round(value, 4) for key, value in r.summary().items()} for r in results},
        "box_copy": native.implementation(),
        "engine": "vllm" if uses_vllm(options.cases[0].ranks) else "tensors laid out as vLLM's",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **commit(),
        "versions": versions(),
    }
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
