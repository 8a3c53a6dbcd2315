"""The arms of bench_reshard: one way each to bring sharded training weights into tensor-parallel engine tensors.

The engine is vLLM's own model (its modules and its ``load_weights``, without scheduler or KV cache), or, where vLLM
is not installed, tensors laid out as vLLM lays them out, loaded by narrow and ``copy_``, which flatters the arms that
load. The trainer is a set of shards laid out exactly as FSDP2 lays them out. No arm computes anything else, so that
what is compared is the transfer.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine import native
from hybridengine.distributed.links import PeerLinks
from hybridengine.distributed.world import World
from hybridengine.sync.plan.boxes import Box
from hybridengine.sync.plan.plan import ReshardPlan
from hybridengine.sync.plan.spec import ITEMSIZE, ShardMap, TensorSlice
from hybridengine.sync.transfer.base import NoEngine, SyncReport, TransferSettings
from hybridengine.sync.transfer.pull import PullTransfer

BUCKET_BYTES = 64 * 2**20


class Tensors(NoEngine):
    """One rank's local tensors under a ShardMap, flat, as far as its slices reach. Either side of a transfer."""

    def __init__(self, layout: ShardMap, rank: int, device: torch.device | None = None) -> None:
        self.layout, self.rank = layout, rank
        self.by_param: dict[str, list[TensorSlice]] = {name: [] for name in layout.params}
        extents: dict[str, int] = {}
        dtypes: dict[str, str] = {}
        for piece in layout.ranks[rank]:
            self.by_param[piece.param].append(piece)
            end = piece.start + sum((n - 1) * s for n, s in zip(piece.sizes, piece.strides, strict=True)) + 1
            extents[piece.tensor] = max(extents.get(piece.tensor, 0), end)
            dtypes[piece.tensor] = layout.dtype[piece.param]
        self.tensors = {
            name: torch.zeros(n, dtype=getattr(torch, dtypes[name]), device=device) for name, n in extents.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors

    live_tensors = local_tensors

    def view(self, piece: TensorSlice) -> torch.Tensor:
        tensor = self.tensors[piece.tensor]
        return tensor.as_strided(piece.sizes, piece.strides, tensor.storage_offset() + piece.start)

    def fill(self, version: int) -> None:
        """Values that follow from the canonical position, so that any engine tensor can be checked."""
        for pieces in self.by_param.values():
            for piece in pieces:
                self.view(piece).copy_(expected(piece, version))

    def holds(self, version: int) -> bool:
        return all(
            torch.equal(self.view(piece), expected(piece, version).to(self.tensors[piece.tensor].dtype))
            for pieces in self.by_param.values()
            for piece in pieces
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Full parameters in; this rank's part of each is cut out and copied in place."""
        for name, full in weights:
            for piece in self.by_param[name]:
                self.view(piece).copy_(box_of(full, (piece.offsets, piece.sizes)))


class VLLMTensors(Tensors):
    """The parameters of vLLM's model at one tensor-parallel rank, and vLLM's own loader for them."""

    def __init__(self, layout: ShardMap, rank: int, hf_config: Any, *, tp: int, dtype: str) -> None:
        from tests.engines.vllm_models import build_model, fake_ranks

        super().__init__(layout, rank)
        self._ranks = lambda: fake_ranks(tp, rank % tp)
        with tempfile.TemporaryDirectory() as directory, self._ranks():
            self._model = build_model(Path(directory), hf_config, tp=tp, dtype=dtype)
        self.tensors = {name: parameter.data for name, parameter in self._model.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._ranks(), torch.no_grad():
            self._model.load_weights(weights)  # type: ignore[operator]


def expected(piece: TensorSlice, version: int) -> torch.Tensor:
    """Small integers, exact in bfloat16, that differ between neighbouring rows, columns and versions."""
    value = torch.full((1,) * len(piece.sizes), float(version % 7))
    for dim, (start, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        steps = torch.arange(start, start + size) % (31 + 6 * dim)
        value = value + steps.view([-1 if d == dim else 1 for d in range(len(piece.sizes))])
    return value


def box_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        full = full.narrow(dim, start, size)
    return full


def walk(pieces: Iterable[TensorSlice], memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, TensorSlice]]:
    """``pieces`` packed one after another into flat ``memory``: each one's part of it."""
    at = 0
    for piece in pieces:
        count = prod(piece.sizes)
        yield memory[at : at + count].view(piece.sizes), piece
        at += count


class Floor:
    """memcpy of as many bytes as the engine holds, from private memory: what the machine allows at best."""

    def __init__(self, rollout: Tensors) -> None:
        self._rollout = rollout
        self._source = torch.ones(rollout.nbytes, dtype=torch.uint8)

    def run(self) -> None:
        at = self._source.data_ptr()
        for tensor in self._rollout.tensors.values():
            ctypes.memmove(tensor.data_ptr(), at, tensor.nbytes)
            at += tensor.nbytes


class Cast:
    """One local pass over the engine's elements from private memory in the trainer's dtype: our box copy or torch's.

    What a sync to another dtype costs if nothing moves between ranks; in the trainer's own dtype, a copy whose stores
    bypass the caches.
    """

    def __init__(self, rollout: Tensors, source: torch.Tensor, *, by_torch: bool) -> None:
        self._pairs, at = [], 0
        for tensor in rollout.tensors.values():
            self._pairs.append((source[at : at + tensor.numel()].view(tensor.shape), tensor))
            at += tensor.numel()
        self._by_torch, self._boxes = by_torch, native.new_boxes(len(self._pairs))
        for row, (src, dst) in zip(self._boxes, self._pairs, strict=True):
            row["src"], row["dst"], row["op"] = src.data_ptr(), dst.data_ptr(), native.copy_op(src.dtype, dst.dtype)
            native.set_dims(row, (src.numel(),), (1,), (1,), (1,))

    def run(self) -> None:
        if self._by_torch:
            for source, target in self._pairs:
                target.copy_(source)
        else:
            native.run_boxes(self._boxes)


class Pull:
    """Ours."""

    def __init__(self, world: World, train: Tensors, rollout: Tensors, plan: ReshardPlan, *, verify: bool) -> None:
        settings = TransferSettings(world=world, verify=verify, bucket_mib=BUCKET_BYTES >> 20, timeout_seconds=60)
        self._transfer = PullTransfer(train, rollout, plan, settings)
        self.version = 0
        self.report: SyncReport | None = None

    def run(self) -> None:
        self.version += 1
        self.report = self._transfer.run(self.version)


class Gather:
    """gloo all-gather of each parameter's padded shards, as FSDP2's ``full_tensor`` does, then load_weights."""

    def __init__(self, world: World, train: Tensors, rollout: Tensors) -> None:
        self._world, self._train, self._rollout = world, train, rollout
        self._pieces: dict[str, list[list[TensorSlice]]] = {
            name: [[] for _ in range(world.size)] for name in train.layout.params
        }
        for rank in range(world.size):
            for piece in train.layout.ranks[rank]:
                self._pieces[piece.param][rank].append(piece)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, ranks in self._pieces.items():
            padded = max(sum(prod(piece.sizes) for piece in pieces) for pieces in ranks)
            dtype = getattr(torch, self._train.layout.dtype[name])
            mine, everyone = torch.empty(padded, dtype=dtype), torch.empty(padded * self._world.size, dtype=dtype)
            for part, piece in walk(ranks[self._world.rank], mine):
                part.copy_(self._train.view(piece))
            dist.all_gather_single(everyone, mine)
            full = torch.empty(self._train.layout.params[name].shape, dtype=dtype)
            for rank, pieces in enumerate(ranks):
                for part, piece in walk(pieces, everyone[rank * padded :]):
                    box_of(full, (piece.offsets, piece.sizes)).copy_(part)
            yield name, full

    def run(self) -> None:
        self._rollout.load_weights(self.full_parameters())


class SharedAssembly:
    """Every parameter is assembled once per node in shared memory; every rank then loads it from there.

    With a bucket, parameters go through two shared buffers in turn; without, the whole model is assembled first.
    """

    def __init__(self, world: World, train: Tensors, rollout: Tensors, *, bucket: int | None) -> None:
        self._train, self._rollout = train, rollout
        sizes = {n: s.numel * ITEMSIZE[train.layout.dtype[n]] for n, s in train.layout.params.items()}
        limit = max(bucket or sum(sizes.values()), max(sizes.values()))
        self._groups: list[list[tuple[str, int]]] = [[]]
        used = 0
        for name, nbytes in sizes.items():
            if used + nbytes > limit:
                self._groups.append([])
                used = 0
            self._groups[-1].append((name, used))
            used += nbytes
        self._buffers = [shared_memory(world, limit) for _ in range(1 if bucket is None else 2)]
        self.shared_bytes = limit * len(self._buffers)

    def _full(self, name: str, offset: int, buffer: torch.Tensor) -> torch.Tensor:
        spec, dtype = self._train.layout.params[name], getattr(torch, self._train.layout.dtype[name])
        return buffer[offset : offset + spec.numel * dtype.itemsize].view(dtype).view(spec.shape)

    def run(self) -> None:
        for turn, group in enumerate(self._groups):
            buffer = self._buffers[turn % len(self._buffers)]
            for name, offset in group:
                full = self._full(name, offset, buffer)
                for piece in self._train.by_param[name]:
                    box_of(full, (piece.offsets, piece.sizes)).copy_(self._train.view(piece))
            dist.barrier()  # assembled; with two buffers this also says that the other one has been read
            self._rollout.load_weights((name, self._full(name, offset, buffer)) for name, offset in group)
        dist.barrier()


def shared_memory(world: World, nbytes: int) -> torch.Tensor:
    """One uint8 block that all ranks map (collective)."""
    fd = os.memfd_create("bench-reshard", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    links = PeerLinks.connect([fd], group=None, timeout_seconds=60)
    fds = {**{rank: passed[0] for rank, passed in links.fds.items()}, world.rank: fd}
    memory = torch.frombuffer(mmap.mmap(fds[0], nbytes), dtype=torch.uint8)
    for passed in fds.values():
        os.close(passed)
    links.close()
    return memory


def proportional_set_bytes() -> int:
    """PSS of this process: private memory plus its share of what it shares. Adds up over processes."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def node_memory() -> int:
    """PSS of all ranks together, memory that malloc merely keeps given back first (collective)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    total = torch.tensor([proportional_set_bytes()])
    dist.all_reduce(total)
    return int(total)


Run = Callable[[], None]
