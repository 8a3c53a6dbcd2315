"""Regions: shards moved into shared memory stay the trainer's own, and peers can only read them."""

from __future__ import annotations

import faulthandler
import mmap
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hybridengine.distributed.world import World
from hybridengine.memory.tracker import host_memory
from hybridengine.platform.cpu.mapped import MappedOffload
from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.plan import build_plan
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice
from hybridengine.sync.transfer.base import StaleGenerationError, TransferSettings
from hybridengine.sync.transfer.control import ControlPage
from hybridengine.sync.transfer.region import PAGE_BYTES, MappedRegion, Region
from hybridengine.sync.transfer.registry import make_transfer
from tests.distributed.ranks import run_ranks


def test_adopt_keeps_objects_values_and_views() -> None:
    memory = torch.arange(100.0)
    tensors = {"a": memory[:40].view(8, 5), "b": memory[40:70].view(5, 6).t(), "c": torch.arange(7).to(torch.bfloat16)}
    identity, values = {n: id(t) for n, t in tensors.items()}, {n: t.clone() for n, t in tensors.items()}
    region = Region.adopt(tensors, holders=[memory], readers=1)
    for name, tensor in tensors.items():
        placed = region.table[name]
        assert id(tensor) == identity[name] and torch.equal(tensor, values[name])
        assert tensor.data_ptr() == region.address + placed.offset and tensor.stride() == placed.strides
    memory.add_(1)
    assert torch.equal(tensors["a"], values["a"] + 1)
    region.check(tensors)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_mapped_memory_follows_writes_and_is_read_only() -> None:
    """Checked in another process: a store through the mapping must kill it, not damage the weights."""
    tensors = {"w": torch.arange(5000.0)}
    region = Region.adopt(tensors, readers=2)
    mapped = MappedRegion(os.dup(region.fd), region.info)
    tensors["w"][17] = -1
    view = torch.frombuffer(mapped._array, dtype=torch.float32, offset=region.table["w"].offset, count=5000)
    assert torch.equal(view, tensors["w"])
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        view[0] = 5.0
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert tensors["w"][0] == 0


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_region_on_disk_leaves_the_memory_of_owner_and_reader(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(5_000_000.0), "b": torch.arange(7.0)}
    region = Region.adopt(tensors, readers=2, directory=tmp_path)
    mapped = MappedRegion(os.dup(region.fd), region.info)
    offload = MappedOffload(tensors.values, directory=tmp_path)
    view = torch.frombuffer(mapped._array, dtype=torch.float32, offset=region.table["w"].offset, count=5_000_000)
    for turn in range(3):
        tensors["w"][turn] = -1.0
        mapped.wake()
        assert torch.equal(view, tensors["w"])
        held = host_memory().pss
        mapped.rest()
        offload.offload()
        assert held - host_memory().pss >= 0.95 * tensors["w"].nbytes
        offload.onload()
        region.check(tensors)
    expected = torch.arange(5_000_000.0)
    expected[:3] = -1.0
    assert torch.equal(tensors["w"], expected)
    with pytest.raises(OSError, match=r"memory\.offload_dir"):
        Region(1 << 60, readers=1, directory=tmp_path)


def test_control_page_checks_what_it_maps_and_who_writes() -> None:
    region = Region.allocate(100, readers=3)
    page = MappedRegion(os.dup(region.fd), region.info).control
    region.control.publish(4, version=7)
    assert not page.is_published(5, 8) and page.is_published(4, 7)
    with pytest.raises(StaleGenerationError, match="generation 4 .policy version 7.*generation 3"):
        page.is_published(3, 6)
    page.set("drained", 9, reader=2)
    assert region.control.get("drained", 2) == 9 and region.control.get("drained", 1) == 0
    with pytest.raises(ValueError, match="reader 3"):
        page.set("drained", 1, reader=3)
    with pytest.raises(StaleGenerationError, match="not a control page"):
        ControlPage(mmap.mmap(-1, PAGE_BYTES), readers=1)
    assert region.data_address - region.address == PAGE_BYTES


# -- FSDP2 ---------------------------------------------------------------------------------------------------


class Trainer:
    """A two-layer model under FSDP2; 10 rows over 4 ranks make uneven, padded and empty shards."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2, bias=False))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.size = size

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.reshard()

    def local_tensors(self) -> dict[str, torch.Tensor]:
        return {name: p.to_local().detach() for name, p in self.model.named_parameters()}

    def memory_holders(self) -> list[torch.Tensor]:
        groups = [
            group
            for module in self.model.modules()
            if hasattr(module, "_get_fsdp_state")
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        params = [param for group in groups for param in group.fsdp_params]
        return [tensor for p in params for tensor in (p._sharded_param_data, p.sharded_param._local_tensor)]

    def full(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}

    def maps(self) -> tuple[ShardMap, ShardMap]:
        params, held, whole = {}, [[] for _ in range(self.size)], []
        for name, p in self.model.named_parameters():
            shape = tuple(p.shape)
            params[name] = ParamSpec(name, shape, "float32")
            step = -(-shape[0] // self.size)
            for rank in range(self.size):
                rows = min((rank + 1) * step, shape[0]) - min(rank * step, shape[0])
                if rows:
                    sizes = (rows, *shape[1:])
                    offsets = (rank * step, *(0,) * (len(shape) - 1))
                    held[rank].append(TensorSlice(name, offsets, sizes, name, 0, contiguous_strides(sizes)))
            whole.append(TensorSlice(name, (0,) * len(shape), shape, name, 0, contiguous_strides(shape)))
        dtype = dict.fromkeys(params, "float32")
        return ShardMap(params, held, dtype), ShardMap(params, [whole] * self.size, dtype)


class Rollout:
    def __init__(self, target: ShardMap) -> None:
        self.tensors = {name: torch.full(spec.shape, -1.0) for name, spec in target.params.items()}

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors


def train_in_shared_memory(world: World) -> None:
    """Same trajectory, bit by bit, as a twin in ordinary memory; adopted before the first forward pass or after it."""
    for warm in (False, True):
        ours, twin = Trainer(world.size), Trainer(world.size)
        if warm:
            ours.step(100)
            twin.step(100)
        source, target = ours.maps()
        rollout = Rollout(target)
        settings = TransferSettings(world=world, timeout_seconds=20)
        transfer = make_transfer("pull", ours, rollout, build_plan(source, target), settings)
        where = {name: t.data_ptr() for name, t in ours.local_tensors().items()}
        for version in (1, 2, 3):
            ours.step(version)
            twin.step(version)
            report = transfer.run(version)
            expected = twin.full()
            assert all(torch.equal(rollout.tensors[name], value) for name, value in expected.items()), version
            assert {name: t.data_ptr() for name, t in ours.local_tensors().items()} == where
            assert report.extra_bytes == 0 and report.bytes_received == report.bytes_minimum
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4], ids=["2ranks", "4ranks-uneven"])
def test_fsdp2_trains_in_shared_memory(size: int) -> None:
    run_ranks(size, train_in_shared_memory, timeout=90)
