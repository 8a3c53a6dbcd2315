"""Per-rank layouts to one ShardMap of the whole job. The merge is pure; only ``gather_shard_map`` communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hybridengine.distributed.errors import agree
from hybridengine.reshard.spec import Holding, ParamSpec, Pattern, Piece, ShardMap, TensorSlice


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank's slices in compact form: each distinct set of pieces once.

    Attributes:
        pieces: distinct sets of pieces.
        layouts: per parameter this rank holds: index into ``pieces``, and the tensor names of its slots.
        dtypes: dtype name per parameter this rank holds.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    layouts: dict[str, tuple[int, tuple[str, ...]]]
    dtypes: dict[str, str]

    @classmethod
    def of(cls, slices: Iterable[TensorSlice], dtype: Mapping[str, str]) -> RankLayout:
        """``dtype`` is the dtype name by *tensor* name."""
        by_param: dict[str, list[TensorSlice]] = {}
        for item in slices:
            by_param.setdefault(item.param, []).append(item)
        known: dict[tuple[Piece, ...], int] = {}
        layouts, dtypes = {}, {}
        for param, items in by_param.items():
            names: dict[str, int] = {}
            found = tuple(
                sorted(
                    Piece(s.offsets, s.sizes, names.setdefault(s.tensor, len(names)), s.start, s.strides)
                    for s in sorted(items, key=lambda s: (s.offsets, s.sizes, s.tensor, s.start))
                )
            )
            kinds = {dtype[name] for name in names}
            if len(kinds) > 1:
                raise ValueError(f"{param} is held in tensors of different dtypes: {sorted(kinds)}")
            layouts[param] = known.setdefault(found, len(known)), tuple(names)
            dtypes[param] = kinds.pop()
        return cls(tuple(known), layouts, dtypes)


def merge_layouts(params: Mapping[str, ParamSpec], ranks: Sequence[RankLayout]) -> ShardMap:
    """The ShardMap whose rank r holds ``ranks[r]``.

    Raises:
        ValueError: naming parameters that no rank holds, in part or in whole, or in differing dtypes.
    """
    patterns: dict[tuple[object, ...], Pattern] = {}
    holdings: dict[str, Holding] = {}
    dtype: dict[str, str] = {}
    nowhere = [name for name in params if not any(name in rank.layouts for rank in ranks)]
    if nowhere:
        raise ValueError(
            f"the engine loads these parameters nowhere: {nowhere[:10]} ({len(nowhere)} in all). "
            "A tied output projection must not be listed beside the embedding it is tied to"
        )
    for name, spec in params.items():
        slots: dict[str, int] = {}
        key: list[tuple[int, tuple[int, ...]] | None] = []
        for rank in ranks:
            layout = rank.layouts.get(name)
            if layout is None:
                key.append(None)
                continue
            key.append((layout[0], tuple(slots.setdefault(tensor, len(slots)) for tensor in layout[1])))
            if dtype.setdefault(name, rank.dtypes[name]) != rank.dtypes[name]:
                raise ValueError(f"{name} is {dtype[name]} on one rank and {rank.dtypes[name]} on another")
        same = (spec.shape, *key)
        if same not in patterns:
            patterns[same] = Pattern(
                spec.shape,
                [
                    ()
                    if entry is None
                    else tuple(piece._replace(slot=entry[1][piece.slot]) for piece in rank.pieces[entry[0]])
                    for entry, rank in zip(key, ranks, strict=True)
                ],
            )
        holdings[name] = Holding(patterns[same], tuple(slots))
    return ShardMap.from_holdings(params, holdings, dtype, len(ranks)).validate()


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
    everyone: list[RankLayout | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return merge_layouts(params, [layout for layout in everyone if layout is not None])
