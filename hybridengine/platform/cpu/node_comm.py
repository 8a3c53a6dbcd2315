"""FSDP2's all-gather and reduce-scatter through memory that the ranks of one node share (CPU).

gloo sends every byte through a loopback socket. Ranks of one node can do better:

- all-gather: there is one output buffer for the whole node. Every rank writes its shard into its place
  and waits for the others; then the gathered result is simply there, for all of them.
- reduce-scatter: every rank writes its gradients into its own shared buffer, waits for the others, and sums
  its part over all buffers, in rank order, so that the result does not depend on timing.

Each has two buffers, used in turn, and therefore needs only one barrier per call: whoever passes barrier
k + 1 knows that all ranks have finished reading call k (FSDP2 copies the result of one all-gather out
before it starts the next; the sum runs inside the call), so the buffer of call k is free for call k + 2.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from hybridengine.distributed.errors import agree
from hybridengine.distributed.links import PeerLinks, node_identity

_TIMEOUT_SECONDS = 60.0


def share_node_memory(modules: Sequence[FSDPModule], group: dist.ProcessGroup) -> bool:
    """Let ``modules`` communicate through shared memory if all ranks of ``group`` are on one node. Collective.

    Args:
        modules: FSDP2 modules on the CPU, already sharded.

    Returns:
        whether they do now; if not they keep using gloo.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return False
    nodes: list[Any] = [None] * size
    dist.all_gather_object(nodes, node_identity(), group=group)
    if len(set(nodes)) > 1:
        return False
    gather_bytes = reduce_bytes = 0
    for module in modules:
        for param_group in module._get_fsdp_state()._fsdp_param_groups:
            numels = [param._sharded_param_data.numel() for param in param_group.fsdp_params]
            # A unit of mixed dtypes travels as bytes; float32 is the widest.
            gather_bytes = max(gather_bytes, 4 * size * sum(numels))
            reduce_bytes = max(reduce_bytes, 4 * size * sum(numels))
    gather = _NodeAllGather(_exchange(2, gather_bytes, group, owner=0))
    trainable = any(p.requires_grad for module in modules for p in module.parameters())  # type: ignore[attr-defined]
    scatter = None
    if trainable:
        scatter = _NodeReduceScatter(_exchange(2, reduce_bytes, group, owner=None), dist.get_rank(group))
    for module in modules:
        if module._get_fsdp_state()._fsdp_param_groups:
            module.set_custom_all_gather(gather)
            if scatter is not None:
                module.set_custom_reduce_scatter(scatter)
    return True


def _exchange(count: int, nbytes: int, group: dist.ProcessGroup, *, owner: int | None) -> list[list[Tensor]]:
    """Shared uint8 buffers: ``found[r][i]`` is buffer i of rank r of the group (only of ``owner``, if given)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    owners = range(size) if owner is None else [owner]
    with agree("allocating memory shared by the node", group):
        mine = [_create(nbytes) for _ in range(count if rank in owners else 0)]
    links = PeerLinks.connect(mine, group=group, timeout_seconds=_TIMEOUT_SECONDS)
    try:
        with agree("mapping memory shared by the node", group):
            fds = {**links.fds, rank: mine}
            return [[_map(fd, nbytes) for fd in fds[r]] for r in owners]
    finally:
        links.close()


def _create(nbytes: int) -> int:
    fd = os.memfd_create("hybridengine-collectives", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _map(fd: int, nbytes: int) -> Tensor:
    """The whole block as a uint8 tensor; the mapping lives as long as the tensor. Closes ``fd``."""
    try:
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def _view(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    nbytes = numel * dtype.itemsize
    assert nbytes <= buffer.numel(), (nbytes, buffer.numel())
    return buffer[:nbytes].view(dtype)


class _NodeAllGather(AllGather):
    """See the module's text. FSDP2 copies this rank's shard into the memory that :meth:`allocate` returns."""

    def __init__(self, buffers: list[list[Tensor]]) -> None:
        self._buffers = buffers[0]
        self._turn = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._turn ^= 1
        return _view(self._buffers[self._turn], math.prod(int(n) for n in size), dtype)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rank, numel = dist.get_rank(group), input_tensor.numel()
        place = output_tensor[rank * numel : (rank + 1) * numel]
        assert input_tensor.data_ptr() == place.data_ptr(), "FSDP2 did not copy the shard into the shared buffer"
        dist.barrier(group)


class _NodeReduceScatter(ReduceScatter):
    """See the module's text. FSDP2 asks for the input (shared) and then for the output (kept as gradients)."""

    def __init__(self, buffers: list[list[Tensor]], rank: int) -> None:
        self._buffers, self._mine = buffers, buffers[rank]
        self._turn = 0
        self._lent: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = math.prod(int(n) for n in size)
        if self._lent is not None:
            return torch.empty(numel, dtype=dtype, device=device)
        self._turn ^= 1
        self._lent = _view(self._mine[self._turn], numel, dtype)
        return self._lent

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        assert self._lent is not None and input_tensor.data_ptr() == self._lent.data_ptr()
        self._lent = None
        dist.barrier(group)
        rank, numel = dist.get_rank(group), output_tensor.numel()
        parts = [
            _view(buffers[self._turn], input_tensor.numel(), input_tensor.dtype)[rank * numel : (rank + 1) * numel]
            for buffers in self._buffers
        ]
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)
