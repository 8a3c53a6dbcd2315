"""Which rank should hold which FSDP shard, and along which dimension, so that fewest bytes move.

A rank of an inference group of t needs 1/t of most weights. FSDP-N leaves it 1/N, and those bytes help
only if they lie inside the part it needs. For N ranks in consecutive groups of t, give rank r the shard

    s(r) = (r mod t) * (N / t) + floor(r / t)

and cut row-parallel weights (o_proj, down_proj) along dimension 1: then every shard nests in its rank's
part, and a rank receives 1/t - 1/N instead of up to 1/t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.sync.plan.layouts import StoredTensor, fsdp_shard_map
from hybridengine.sync.plan.naming.families import HFConfig
from hybridengine.sync.plan.naming.huggingface import stored_tensors
from hybridengine.sync.plan.naming.vllm import vllm_table_map
from hybridengine.sync.plan.pairing import missing_elements
from hybridengine.sync.plan.spec import ITEMSIZE, ParamSpec, Pattern, ShardMap


def nested_order(world_size: int, tp: int) -> tuple[int, ...]:
    """``order[s]`` = the rank that holds shard s, for inference groups of ``tp`` consecutive ranks.

    Example: 8 ranks in groups of 2: the even ranks hold the first half.

    >>> nested_order(8, 2)
    (0, 2, 4, 6, 1, 3, 5, 7)
    """
    if world_size % tp:
        raise ValueError(f"{world_size} ranks can't form tensor-parallel groups of {tp}")
    order = [0] * world_size
    for rank in range(world_size):
        order[(rank % tp) * (world_size // tp) + rank // tp] = rank
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to shard. ``received[r]``: bytes rank r would receive at each sync, in the rollout's dtypes."""

    name: str
    order: tuple[int, ...]
    dims: dict[str, int]
    received: tuple[int, ...]

    @property
    def per_rank(self) -> int:
        """Bytes of the rank that receives most: what a sync waits for."""
        return max(self.received)


@dataclass(frozen=True, slots=True)
class ShardingChoice:
    """The best candidate and all that were looked at, ``gather_bytes`` for comparison (per rank at most)."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    gather_bytes: int

    @property
    def order(self) -> tuple[int, ...]:
        return self.best.order

    @property
    def dims(self) -> dict[str, int]:
        return self.best.dims

    def explain(self) -> str:
        """A table for the log: bytes per rank and sync of every candidate."""
        lines = [f"FSDP shards: {self.best.name} ({self.best.per_rank / 1e9:.2f} GB received per rank and sync)"]
        rows = [(c.name, c.per_rank) for c in self.candidates] + [("full gather", self.gather_bytes)]
        for name, received in rows:
            lines.append(f"  {name:<36} {received / 1e9:9.3f} GB")
        return "\n".join(lines)


def choose_fsdp_sharding(
    params: Mapping[str, ParamSpec],
    target: ShardMap,
    *,
    tp: int,
    stored: Sequence[StoredTensor] | None = None,
) -> ShardingChoice:
    """Compare rank order and nested order, dimension 0 everywhere and the best dimension per tensor.

    Args:
        params: canonical parameters.
        target: the rollout layout, of which ``tp`` consecutive ranks form a replica.
        stored: the model's own tensors where they differ from ``params``.

    Of candidates that receive the same, the plainest wins: rank order, dimension 0.
    """
    world = target.world_size
    stored = [StoredTensor.plain(spec) for spec in params.values()] if stored is None else list(stored)
    orders = {"rank order": tuple(range(world))}
    if tuple(range(world)) != (nested := nested_order(world, tp)):
        orders["nested order"] = nested
    candidates = []
    for name, order in orders.items():
        # costs[dim][tensor name] = bytes received per rank when that tensor is cut along dim
        costs = {0: _costs(params, target, stored, order, 0)}
        for dim in range(1, max((len(tensor.shape) for tensor in stored), default=0)):
            costs[dim] = _costs(params, target, [t for t in stored if _even(t, dim, world)], order, dim)
        best = {
            tensor.name: min((d for d in costs if tensor.name in costs[d]), key=lambda d: costs[d][tensor.name].sum())  # noqa: B023
            for tensor in stored
        }
        for dims, label in (({}, "dimension 0"), ({n: d for n, d in best.items() if d}, "best dimensions")):
            received = sum(
                (costs[dims.get(tensor.name, 0)][tensor.name] for tensor in stored),
                start=np.zeros(world, dtype=np.int64),
            )
            candidates.append(Candidate(f"{name}, {label}", order, dims, tuple(received.tolist())))
    best_candidate = min(candidates, key=lambda c: (c.per_rank, sum(c.received)))
    total = sum(spec.numel * ITEMSIZE[target.dtype[spec.name]] for spec in params.values())
    held = fsdp_shard_map(
        params, world, order=best_candidate.order, dims=best_candidate.dims, stored=stored, dtype=target.dtype
    )
    gather = total - min(held.held_bytes(rank) for rank in range(world))
    return ShardingChoice(best_candidate, tuple(candidates), gather)


def sharding_for(config: HFConfig, *, world_size: int, tp: int, dtype: str = "bfloat16") -> ShardingChoice:
    """The choice for a transformers model that vLLM serves at ``tp``, before either engine exists.

    Raises:
        ValueError: an architecture without a table, or sizes that ``tp`` does not divide.
    """
    target = vllm_table_map(config, tp=tp, world_size=world_size, dtype=dtype)
    return choose_fsdp_sharding(target.params, target, tp=tp, stored=stored_tensors(config))


def _even(tensor: StoredTensor, dim: int, world: int) -> bool:
    return dim < len(tensor.shape) and tensor.shape[dim] % world == 0


def _costs(
    params: Mapping[str, ParamSpec], target: ShardMap, stored: Sequence[StoredTensor], order: Sequence[int], dim: int
) -> dict[str, np.ndarray]:
    """Bytes each rank lacks of each stored tensor when all of them are cut along ``dim``."""
    names = {part.param for tensor in stored for part in tensor.parts}
    held = fsdp_shard_map(
        {name: spec for name, spec in params.items() if name in names},
        target.world_size,
        dims={tensor.name: dim for tensor in stored},
        order=order,
        stored=stored,
    )
    known: dict[tuple[int, int, int], np.ndarray] = {}

    def lacking(source: Pattern, wanted: Pattern, itemsize: int) -> np.ndarray:
        key = id(source), id(wanted), itemsize
        if key not in known:
            elements = [
                missing_elements(source.shape, source.ranks[rank], [piece.box for piece in wanted.ranks[rank]])
                for rank in range(target.world_size)
            ]
            known[key] = np.array(elements, dtype=np.int64) * itemsize
        return known[key]

    return {
        tensor.name: sum(
            (
                lacking(
                    held.holdings[part.param].pattern,
                    target.holdings[part.param].pattern,
                    ITEMSIZE[target.dtype[part.param]],
                )
                for part in tensor.parts
            ),
            start=np.zeros(target.world_size, dtype=np.int64),
        )
        for tensor in stored
    }
