"""KV cache and attention of the transformers engine: written in place, read without copies.

Departs from transformers' own in two ways, both of which matter per decode step: ``DynamicCache`` copies the
whole cache to append one token, and its SDPA attention copies every key and value once per query head of a
group. Here a layer's cache has room to grow into, and the query heads of a group are presented to the kernel
as so many positions of one head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: Name of :func:`grouped_attention` among transformers' attention implementations.
ATTENTION = "hybridengine_grouped"


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, [B, KV heads, capacity, head size] of which ``length`` positions are filled."""

    ROOM = 64  # positions allocated ahead
    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, KV heads, Q, head size]; returns all that is filled, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = self._roomier(self.keys, end), self._roomier(self.values, end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _roomier(self, old: Tensor, end: int) -> Tensor:
        batch, heads, _, size = old.shape
        new = old.new_empty(batch, heads, end + self.ROOM, size)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (or repeat) these rows of the batch."""
        self.keys = self.keys[:, :, : self.length].index_select(0, indices)
        self.values = self.values[:, :, : self.length].index_select(0, indices)


def new_cache(num_layers: int) -> Cache:
    """An empty cache."""
    return Cache(layers=[GrowingLayer() for _ in range(num_layers)])


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' modules.

    Args:
        query: [B, heads, Q, head size].
        key, value: [B, KV heads, S, head size].
        attention_mask: bool, broadcastable to [B, 1, Q, S]; None for none (Q = 1).

    Returns:
        [B, Q, heads, head size], None.
    """
    batch, heads, length, size = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, out.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
