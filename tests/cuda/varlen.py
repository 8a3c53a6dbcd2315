"""torch.nn.attention.varlen.varlen_attn without its kernel: the same contract, one sequence at a time.

Refuses what the flash kernel refuses (torch 2.13, torch/nn/attention/varlen.py and
aten/src/ATen/native/transformers/cuda/flash_attn): other dtypes than the two of 16 bits, tensors whose last dimension
has a stride, int64 offsets, head sizes that are no multiple of 8, fewer key heads without ``enable_gqa``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """[T, H, D] each; ``window_size``: (left, right), -1 for no limit, inclusive, about a query's own place."""
    for tensor in (query, key, value):
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {tensor.dtype}")
        if tensor.stride(-1) != 1 or tensor.shape[-1] % 8:
            raise RuntimeError("FlashAttention needs a contiguous last dimension of a multiple of 8")
    if cu_seq_k is None or cu_seq_q.dtype != torch.int32 or cu_seq_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("fewer key heads than query heads need enable_gqa=True")
    lengths = cu_seq_q.diff()
    if int(lengths.max()) > max_q or int(cu_seq_q[-1]) != len(query):
        raise RuntimeError("a sequence is longer than max_q, or the offsets do not end with the tokens: out of bounds")
    parts = []
    left, right = window_size
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        place = torch.arange(end - begin)
        apart = place[:, None] - place[None, :]  # how far a key lies behind
        seen = (apart <= left if left >= 0 else torch.ones_like(apart, dtype=torch.bool)) & (
            apart >= -right if right >= 0 else torch.ones_like(apart, dtype=torch.bool)
        )
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)
