"""Weights from a training pool to a rollout pool: every slice once, or every parameter in full to everybody.

    .venv/bin/python -m benchmarks.placement_broadcast --model dense --train 2 --rollout 2 --tp 2

Both arms move between the same tensors: the shards of FSDP2 over the training ranks, in float32, and tensors laid out
as vLLM's at the tensor-parallel size of the rollout ranks, in the engine's dtype.

- broadcast      sync.method=broadcast: the reshard plan's missing bytes, in buckets; fingerprints of every parameter
- per-parameter  for each parameter: the training ranks gather it in full, the first one casts it and broadcasts it to
                 all rollout ranks, each of which copies its slices out of it. Nothing is verified

Arms take turns; an arm's time is that of its slowest rank; the ratio is a median over rounds. Live weights are compared
with what the trainer has at the start and at the end. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.bench_reshard import MODELS, timed
from benchmarks.reshard_arms import Tensors, box_of
from hybridengine.distributed.world import World
from hybridengine.sync.plan.layouts import fsdp_shard_map
from hybridengine.sync.plan.naming.vllm import vllm_table_map
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.sync.transfer.base import NoEngine, TransferSettings
from hybridengine.sync.transfer.registry import make_transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Training and rollout ranks, the latter in replicas of ``tp``."""

    model: str
    train: int
    rollout: int
    tp: int
    dtype: str

    def plan(self) -> ReshardPlan:
        """Training ranks first; each side's map has nothing on the other side's ranks."""
        target = vllm_table_map(MODELS[self.model](), tp=self.tp, world_size=self.rollout, dtype=self.dtype)
        source = fsdp_shard_map(target.params, self.train, dtype="float32")
        return build_plan(
            ShardMap(source.params, [*source.ranks, *([()] * self.rollout)], source.dtype),
            ShardMap(target.params, [*([()] * self.train), *target.ranks], target.dtype),
        )


@dataclass(slots=True, kw_only=True)
class Result:
    """Seconds per arm and round; bytes that the rollout ranks received, and needed, together."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    received: int = 0
    minimum: int = 0
    full: int = 0

    @property
    def speedup(self) -> float:
        pairs = zip(self.seconds["per-parameter"], self.seconds["broadcast"], strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)


class PerParameter:
    """See the module's text. Groups: of the training ranks; of the first one and the rollout ranks."""

    def __init__(self, case: Case, plan: ReshardPlan, rank: int, tensors: Tensors) -> None:
        self._case, self._rank, self._tensors, self._plan = case, rank, tensors, plan
        self._trainers = dist.new_group(list(range(case.train)))
        self._wire = dist.new_group([0, *range(case.train, case.train + case.rollout)])
        self._shards = {
            name: [piece for r in range(case.train) for piece in plan.source.ranks[r] if piece.param == name]
            for name in plan.source.params
        } if rank < case.train else {}  # fmt: skip

    def run(self) -> None:
        for name, spec in self._plan.target.params.items():
            dtype = getattr(torch, self._plan.target.dtype[name])
            full = torch.empty(spec.shape, dtype=dtype)
            if self._rank < self._case.train:
                gathered = self._gather(name)
                full = gathered.to(dtype)
            if self._rank == 0 or self._rank >= self._case.train:
                dist.broadcast(full, src=0, group=self._wire)
            if self._rank >= self._case.train:
                for piece in self._tensors.by_param[name]:
                    self._tensors.view(piece).copy_(box_of(full, (piece.offsets, piece.sizes)))

    def _gather(self, name: str) -> torch.Tensor:
        """The parameter in full on every training rank, as FSDP2's ``full_tensor``: shards padded to the same size."""
        pieces = self._shards[name]
        if self._case.train == 1:
            return self._tensors.view(pieces[0])
        padded = max(prod(piece.sizes) for piece in pieces)
        mine, everyone = torch.empty(padded), torch.empty(padded * self._case.train)
        own = self._tensors.by_param[name]
        if own:
            mine[: prod(own[0].sizes)] = self._tensors.view(own[0]).reshape(-1)
        dist.all_gather_single(everyone, mine, group=self._trainers)
        parts = [everyone[i * padded :][: prod(piece.sizes)].view(piece.sizes) for i, piece in enumerate(pieces)]
        return torch.cat(parts, 0)


class Broadcast:
    """Ours, as placement=disaggregated sets it up."""

    def __init__(self, case: Case, plan: ReshardPlan, world: World, tensors: Tensors) -> None:
        trains = world.rank < case.train
        settings = TransferSettings(world=world, timeout_seconds=300)
        self._transfer = make_transfer(
            "broadcast", tensors if trains else NoEngine(), NoEngine() if trains else tensors, plan, settings
        )
        self.version, self.received = 0, 0

    def run(self) -> None:
        self.version += 1
        self.received = self._transfer.run(self.version).bytes_received


def run_rank(rank: int, case: Case, rounds: int, directory: str) -> None:
    size = case.train + case.rollout
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    plan = case.plan()
    tensors = Tensors(plan.source if rank < case.train else plan.target, rank)
    ours = Broadcast(case, plan, world, tensors)
    arms: dict[str, Any] = {"broadcast": ours, "per-parameter": PerParameter(case, plan, rank, tensors)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name in list(arms) if turn % 2 else reversed(arms):
            if rank < case.train:
                tensors.fill(turn)
            elif turn in (0, rounds):
                for tensor in tensors.tensors.values():
                    tensor.fill_(-1)
            taken = timed(arms[name].run)
            if turn:  # round 0 faults pages in
                seconds[name].append(taken)
            if rank >= case.train and turn in (0, rounds):
                assert tensors.holds(turn), (case, name)
    received: list[int] = [0] * size
    dist.all_gather_object(received, ours.received)
    if rank == 0:
        full = sum(
            spec.numel * getattr(torch, plan.target.dtype[name]).itemsize for name, spec in plan.target.params.items()
        )
        result = Result(
            seconds=seconds, received=sum(received), minimum=sum(plan.minimum_bytes(r) for r in range(size)),
            full=full * case.rollout,
        )  # fmt: skip
        (Path(directory) / "result.json").write_text(json.dumps(asdict(result)))
    dist.destroy_process_group()


def measure(case: Case, rounds: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="bench-broadcast-") as directory:
        processes = case.train + case.rollout
        mp.spawn(run_rank, args=(case, rounds, directory), nprocs=processes)  # type: ignore[no-untyped-call]
        return Result(**json.loads((Path(directory) / "result.json").read_text()))


def summary(case: Case, result: Result) -> dict[str, Any]:
    return {
        **asdict(case),
        "broadcast_speedup": round(result.speedup, 3),
        "seconds": {name: round(statistics.median(values), 4) for name, values in result.seconds.items()},
        "bytes_received": result.received,
        "bytes_minimum": result.minimum,
        "bytes_received_per_parameter": result.full,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--train", type=int, default=1)
    parser.add_argument("--rollout", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    case = Case(model=options.model, train=options.train, rollout=options.rollout, tp=options.tp, dtype=options.dtype)
    print(json.dumps(summary(case, measure(case, options.rounds))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
