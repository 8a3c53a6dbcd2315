"""Every rank's own layout to the ShardMap of the whole job: the one part of reshard that communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.sync.plan.merge import RankLayout, merge_layouts
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice


def gather_shard_map(
    slices: Iterable[TensorSlice],
    params: Mapping[str, ParamSpec],
    dtype: Mapping[str, str],
    *,
    group: dist.ProcessGroup | None = None,
) -> ShardMap:
    """Collective: every rank gives its slices and gets the map of all ranks of ``group``.

    ``dtype`` is the dtype name by local tensor name. Without torch.distributed this is the map of one rank.

    Raises:
        ValueError: as :func:`merge_layouts`, on every rank alike.
    """
    with agree("describing the layout", group):
        mine = RankLayout.of(slices, dtype)
    if not dist.is_initialized():
        return merge_layouts(params, [mine])
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    digests: list[str] = [""] * size
    dist.all_gather_object(digests, mine.digest, group=group)
    sent: list[RankLayout | None] = [None] * size  # replicas are alike: the first of each kind sends it
    dist.all_gather_object(sent, mine if digests.index(mine.digest) == rank else None, group=group)
    by_digest = {layout.digest: layout for layout in sent if layout is not None}
    return merge_layouts(params, [by_digest[digest] for digest in digests])
