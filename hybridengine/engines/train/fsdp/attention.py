"""Packed attention: linear layers see N real tokens, attention sees each sequence on its own.

The implementation is registered with transformers under :data:`PACKED`; the sequence lengths reach it through
:func:`attending`, because not every decoder hands keyword arguments on to its layers. On CUDA in half precision
the sequences go to varlen flash attention as they are. Elsewhere they are unpacked into right-padded
rows, grouped so that one long sequence does not pad all the others, and go through scaled dot product
attention: under causality the padding to the right of a row needs no mask. Soft-capped scores and attention sinks,
which neither of them has, are computed as they are written, a block of queries at a time.

Shape legend: N tokens, Hq query heads, Hk key/value heads, D head dimension, B rows of S positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hybridengine import platform

PACKED = "hybridengine_packed"

#: Rows are grouped so that at most this share of a group's positions is padding.
MAX_PADDING = 0.25

#: Scores that exist at a time where they are computed one by one, elements.
EAGER_SCORES = 1 << 26


@dataclass(slots=True)
class RowGroup:
    """Sequences of similar length, as rows of one attention call.

    Attributes:
        rows, width: B and S.
        tokens: int64 [B*S], packed index of each row position; padding repeats the row's last token.
            None when the group is a contiguous range of the packed tokens without padding.
        valid: int64 [tokens of the group], flat row positions that are not padding, in row order.
        start, stop: the packed range, when ``tokens`` is None.
    """

    rows: int
    width: int
    tokens: Tensor | None
    valid: Tensor | None
    start: int = 0
    stop: int = 0


@dataclass(slots=True)
class PackedLayout:
    """Where each sequence of a packed micro-batch lies. Built once per forward, used by every layer.

    Attributes:
        num_tokens: N.
        cu_seqlens: int32 [B+1], cumulative lengths.
        max_length: longest sequence.
        groups: row groups for the padded path.
        order: int64 [N], for each packed token its place in the concatenation of the groups' valid tokens;
            None when that concatenation is already in packed order.
    """

    num_tokens: int
    cu_seqlens: Tensor
    max_length: int
    groups: list[RowGroup]
    order: Tensor | None
    _bands: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Lay out sequences of ``lengths`` tokens, in packed order."""
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        starts = torch.cumsum(sizes, 0) - sizes
        groups, packed_index = [], []
        for members in group_rows(lengths):
            groups.append(_row_group(members, sizes, starts, device))
            packed_index += [torch.arange(int(starts[i]), int(starts[i] + sizes[i])) for i in members]
        flat = torch.cat(packed_index)
        order = None if bool((flat == torch.arange(len(flat))).all()) else torch.argsort(flat).to(device)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)]).to(torch.int32)
        return cls(int(sizes.sum()), cu_seqlens.to(device), int(sizes.max()), groups, order)

    def band(self, width: int, window: int, device: torch.device) -> Tensor:
        """Bool [S, S]: causal and at most ``window`` positions back, the position itself included."""
        if (width, window) not in self._bands:
            distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)[None, :]
            self._bands[width, window] = (distance >= 0) & (distance < window)
        return self._bands[width, window]


_current: ContextVar[PackedLayout | None] = ContextVar("packed_layout", default=None)


@contextmanager
def attending(layout: PackedLayout | None) -> Iterator[None]:
    """Inside, :func:`packed_attention` keeps to the sequences of ``layout``."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def current_layout() -> PackedLayout | None:
    """Of the innermost :func:`attending`."""
    return _current.get()


def group_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences of each group; within a group at most :data:`MAX_PADDING` is padding.

    Sequences in their own order make one group where that already holds (no reordering is needed then);
    otherwise they are taken by descending length. ``group_rows([9, 1, 8])`` is ``[[0, 2], [1]]``.
    """
    if sum(lengths) >= (1 - MAX_PADDING) * len(lengths) * max(lengths):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            rows = len(groups[-1]) + 1
            if total + lengths[index] >= (1 - MAX_PADDING) * rows * lengths[groups[-1][0]]:
                groups[-1].append(index)
                total += lengths[index]
                continue
        groups.append([index])
        total = lengths[index]
    return groups


def _row_group(members: list[int], sizes: Tensor, starts: Tensor, device: torch.device) -> RowGroup:
    size, start = sizes[members], starts[members]
    rows, width = len(members), int(size.max())
    if bool((size == width).all()) and bool((start[1:] - start[:-1] == width).all()):
        return RowGroup(rows, width, None, None, int(start[0]), int(start[0]) + rows * width)
    column = torch.arange(width)
    tokens = start[:, None] + torch.minimum(column[None, :], size[:, None] - 1)
    valid = torch.nonzero((column[None, :] < size[:, None]).view(-1)).view(-1)
    return RowGroup(rows, width, tokens.view(-1).to(device), valid.to(device))


class _Unpack(torch.autograd.Function):
    """[N, ...] -> [B*S, ...]. Padding gets no gradient from causal attention, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, group: RowGroup) -> Tensor:  # type: ignore[override]
        assert group.tokens is not None
        ctx.group, ctx.num_tokens = group, packed.shape[0]
        return packed.index_select(0, group.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group: RowGroup = ctx.group
        assert group.tokens is not None and group.valid is not None
        out = grad.new_zeros(ctx.num_tokens, *grad.shape[1:])
        out[group.tokens.index_select(0, group.valid)] = grad.index_select(0, group.valid)
        return out, None


class _Pack(torch.autograd.Function):
    """[B*S, ...] -> [tokens of the group, ...]: drop the padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: RowGroup) -> Tensor:  # type: ignore[override]
        assert group.valid is not None
        ctx.group, ctx.size = group, rows.shape[0]
        return rows.index_select(0, group.valid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        out = grad.new_zeros(ctx.size, *grad.shape[1:])
        out[ctx.group.valid] = grad
        return out, None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, in transformers' attention interface.

    Args:
        query: [1, Hq, N, D].
        key, value: [1, Hk, N, D].
        attention_mask: ignored; transformers passes None for this implementation.
        sliding_window: positions a token may look back, itself included; None for all.
        softcap: scores s become ``softcap * tanh(s / softcap)`` (Gemma 2, arXiv:2408.00118).
        s_aux: [Hq], per head the score of a key without value that every query sees as well (GPT-OSS's sinks).

    Returns:
        [1, N, Hq, D], and no attention weights.
    """
    layout = _current.get()
    assert layout is not None, "packed attention outside of attending()"
    plain = softcap is None and s_aux is None
    if plain and platform.of(query.device).has_varlen_attention(query.dtype):
        return _varlen(query, key, value, layout, scaling, sliding_window), None
    # [N, H, D]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    parts = [_attend(q, k, v, group, layout, scaling, sliding_window, softcap, s_aux) for group in layout.groups]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if layout.order is not None:
        out = out.index_select(0, layout.order)
    return out[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: RowGroup,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One group of rows: [N, H, D] each -> [tokens of the group, Hq, D]."""

    def rows(packed: Tensor) -> Tensor:
        flat = packed[group.start : group.stop] if group.tokens is None else _Unpack.apply(packed, group)
        return flat.view(group.rows, group.width, *packed.shape[1:]).transpose(1, 2)

    banded = window is not None and group.width > window
    mask = layout.band(group.width, window, q.device) if banded else None  # type: ignore[arg-type]
    if softcap is not None or sinks is not None:
        band = layout.band(group.width, window if banded else group.width, q.device)  # type: ignore[arg-type]
        out = _eager(rows(q), rows(k), rows(v), band, scaling, softcap, sinks)
    else:
        out = scaled_dot_product_attention(
            rows(q),
            rows(k),
            rows(v),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    flat = out.transpose(1, 2).reshape(group.rows * group.width, q.shape[1], v.shape[2])
    return flat if group.valid is None else _Pack.apply(flat, group)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as it is written: [B, Hq, S, D], [B, Hk, S, D] -> [B, Hq, S, D]; ``band`` bool [S, S] is what each
    query sees. As many queries at a time as make :data:`EAGER_SCORES` scores; those are computed again backward."""
    from torch.utils.checkpoint import checkpoint

    repeats = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v)) if repeats > 1 else (k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling

    def block(part: Tensor, seen: Tensor) -> Tensor:
        scores = (part @ k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is None:
            return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        extra = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, extra.to(scores.dtype)], dim=-1).softmax(-1, dtype=torch.float32)
        return weights[..., :-1].to(v.dtype) @ v

    count = max(1, EAGER_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    pairs = list(zip(q.split(count, dim=2), band.split(count), strict=True))
    if len(pairs) == 1:
        return block(*pairs[0])
    return torch.cat([checkpoint(block, *pair, use_reentrant=False) for pair in pairs], dim=2)


@functools.cache
def _varlen_groups() -> bool:
    """Whether torch's varlen_attn takes fewer key heads than query heads; since 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if grouped and not _varlen_groups():
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = {}
    out = varlen_attn(
        q,
        k,
        v,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=scaling,
        # (left, 0) is causal; flash attention counts the window without the position itself.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out[None]


def register_packed_attention() -> None:
    """Make :data:`PACKED` known to transformers. Idempotent.

    No mask function is registered on purpose: transformers then builds no mask for this implementation.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
