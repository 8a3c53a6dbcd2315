"""Checkpoint coordinates of a rank's own tensors: filling them from safetensors, and giving parameters in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.sync.plan.views import view_of

#: Tensors that older checkpoints carry along and that nothing is computed from.
_IGNORED = (".rotary_emb.inv_freq",)


def check_tensors(source: SafetensorsSource, shard_map: ShardMap, *, tied: bool) -> None:
    """The checkpoint has exactly the parameters of the layout, in the same shapes.

    Raises:
        ValueError: naming the first that are missing, extra or of another shape.
    """
    stored, wanted = set(source.names()), set(shard_map.params)
    allowed = {"lm_head.weight"} if tied else set()
    extra = {name for name in stored - wanted - allowed if not name.endswith(_IGNORED)}
    for what, names in (("missing", wanted - stored), ("not part of this architecture", extra)):
        if names:
            raise ValueError(
                f"model.path={source.path}: {len(names)} tensors of the checkpoint are {what}, first: {min(names)}; "
                f"it must hold what config.json describes"
            )
    for name, spec in shard_map.params.items():
        if (shape := source.shape(name)) != spec.shape:
            raise ValueError(
                f"model.path={source.path}: {name} has shape {shape} in the checkpoint, {spec.shape} by config.json"
            )


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], shard_map: ShardMap, rank: int, source: SafetensorsSource) -> None:
    """Read this rank's slices into its tensors; what no slice covers (vocabulary padding) is 0."""
    slices = shard_map.ranks[rank]
    known = {name for holding in shard_map.holdings.values() for name in holding.tensors}
    unknown = (set(tensors) - known) | ({item.tensor for item in slices} - set(tensors))
    if unknown:
        raise ValueError(f"megatron's parameters are not those of the layout: {sorted(unknown)[:5]} ({len(unknown)})")
    covered = dict.fromkeys(tensors, 0)
    for item in slices:
        covered[item.tensor] += item.numel
    for name, tensor in tensors.items():
        if covered[name] < tensor.numel():
            tensor.zero_()
    for item in slices:
        view_of(tensors[item.tensor], item).copy_(source.read(item.param, item.offsets, item.sizes))


def mark_sharded(tensors: Mapping[str, Tensor], shard_map: ShardMap, rank: int) -> None:
    """Tell megatron which tensors tensor parallelism cuts: the gradient norm counts the others on one rank only.

    A tensor is whole where this rank has all of every parameter that has a part in it on any rank. Megatron's layers
    note it where they initialise their weights, which ours do not.
    """
    missing = dict.fromkeys(tensors, 0)
    for name, (_, names) in shard_map.holdings.items():
        for tensor in names:
            if tensor in missing:
                missing[tensor] += shard_map.params[name].numel
    for item in shard_map.ranks[rank]:
        missing[item.tensor] -= item.numel
    for key, param in tensors.items():
        param.tensor_model_parallel = missing[key] > 0  # type: ignore[attr-defined]


@torch.no_grad()
def full_parameters(
    shard_map: ShardMap, tensors: Mapping[str, Tensor], rank: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Collective: each canonical parameter in full, one at a time. Its first holder of each part broadcasts it."""
    for name, (pattern, names) in shard_map.holdings.items():
        dtype: Any = getattr(torch, shard_map.dtype[name])
        full = torch.empty(pattern.shape, dtype=dtype, device=device)
        sent: set[tuple[Any, Any]] = set()
        for sender, pieces in enumerate(pattern.ranks):
            mine = [piece for piece in pieces if piece.box not in sent]
            sent.update(piece.box for piece in mine)
            if not mine:
                continue
            counts = [prod(piece.sizes) for piece in mine]
            if rank == sender:
                flat = torch.cat([view_of(tensors[names[piece.slot]], piece).reshape(-1) for piece in mine])
            else:
                flat = full.new_empty(sum(counts))
            dist.broadcast(flat, src=sender)
            for piece, values in zip(mine, flat.split(counts), strict=True):
                full[tuple(slice(o, o + n) for o, n in zip(*piece.box, strict=True))] = values.view(piece.sizes)
        yield name, full
