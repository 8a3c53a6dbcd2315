"""One rank's slices in compact form, and the ShardMap of a whole job made of them. Pure integers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridengine.sync.plan.spec import Holding, ParamSpec, Pattern, Piece, ShardMap, TensorSlice


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank's slices in compact form: each distinct set of pieces once.

    Attributes:
        pieces: distinct sets of pieces.
        layouts: per parameter this rank holds: index into ``pieces``, and the tensor names of its slots.
        dtypes: dtype name per parameter this rank holds.
        digest: equal for equal layouts (replicas), so that each is sent and merged once.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    layouts: dict[str, tuple[int, tuple[str, ...]]]
    dtypes: dict[str, str]
    digest: str

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
        content = repr((list(known), list(layouts.items()), list(dtypes.items()))).encode()
        return cls(tuple(known), layouts, dtypes, hashlib.blake2b(content, digest_size=16).hexdigest())


def merge_layouts(params: Mapping[str, ParamSpec], ranks: Sequence[RankLayout]) -> ShardMap:
    """The ShardMap whose rank r holds ``ranks[r]``.

    Raises:
        ValueError: naming parameters that no rank holds, in part or in whole, or in differing dtypes.
    """
    distinct = {layout.digest: layout for layout in ranks}
    which = {digest: i for i, digest in enumerate(distinct)}
    of_rank = [which[layout.digest] for layout in ranks]
    layouts = list(distinct.values())
    nowhere = [name for name in params if not any(name in layout.layouts for layout in layouts)]
    if nowhere:
        raise ValueError(
            f"the engine loads these parameters nowhere: {nowhere[:10]} ({len(nowhere)} in all). "
            "A tied output projection must not be listed beside the embedding it is tied to"
        )
    patterns: dict[tuple[object, ...], Pattern] = {}
    holdings: dict[str, Holding] = {}
    dtype: dict[str, str] = {}
    for name, spec in params.items():
        slots: dict[str, int] = {}
        key: list[tuple[int, tuple[int, ...]] | None] = []
        for layout in layouts:
            held = layout.layouts.get(name)
            if held is None:
                key.append(None)
                continue
            key.append((held[0], tuple(slots.setdefault(tensor, len(slots)) for tensor in held[1])))
            if dtype.setdefault(name, layout.dtypes[name]) != layout.dtypes[name]:
                raise ValueError(f"{name} is {dtype[name]} on one rank and {layout.dtypes[name]} on another")
        same = (spec.shape, *key)
        if same not in patterns:
            pieces = [_pieces(layout, entry) for layout, entry in zip(layouts, key, strict=True)]
            patterns[same] = Pattern(spec.shape, [pieces[i] for i in of_rank])
        holdings[name] = Holding(patterns[same], tuple(slots))
    return ShardMap.from_holdings(params, holdings, dtype, len(ranks)).validate()


def _pieces(layout: RankLayout, entry: tuple[int, tuple[int, ...]] | None) -> tuple[Piece, ...]:
    """One rank's pieces of a parameter, with its slots renumbered to those of the merged map."""
    if entry is None:
        return ()
    index, slots = entry
    return tuple(piece._replace(slot=slots[piece.slot]) for piece in layout.pieces[index])
