"""Micro-batches in the shapes megatron's layers need: token counts that sequence and pipeline parallelism can cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridengine.engines.train.base import MicroBatch
from hybridengine.engines.train.fsdp.attention import PackedLayout


@dataclass(slots=True)
class PaddedMicroBatch:
    """A micro-batch and what the layers run on: the same tokens, and pad tokens behind them.

    Attributes:
        micro: the micro-batch; its ``target_index`` counts in ``micro.input_ids``.
        input_ids: int64 [b, s], ``micro.input_ids`` and further columns.
        positions: int64 [s], rotary positions, the same for every row.
        layout: the sequences of a packed batch, the padding as one more; None for rows.
        index: place of the micro-batch among those of the call.
    """

    micro: MicroBatch
    input_ids: Tensor
    positions: Tensor
    layout: PackedLayout | None
    index: int

    @property
    def real(self) -> Tensor:
        """bool [b, s]: tokens of samples."""
        real = self.micro.real
        return torch.nn.functional.pad(real, (0, self.input_ids.shape[1] - real.shape[1]), value=False)

    def without_targets(self) -> PaddedMicroBatch:
        return replace(self, micro=self.micro.without_targets())


def pad_micro_batches(
    micro_batches: Sequence[MicroBatch], *, multiple: int, alike: bool, pad_id: int
) -> list[PaddedMicroBatch]:
    """Widen each micro-batch to a multiple of ``multiple`` tokens, all to the widest when ``alike``.

    Causal attention keeps the padding of rows out of what precedes it; in a packed batch it is a sequence of its own.
    """
    widths = [-(-micro.input_ids.shape[1] // multiple) * multiple for micro in micro_batches]
    if alike:
        widths = [max(widths)] * len(widths)
    return [
        _pad(micro, width, pad_id, index)
        for index, (micro, width) in enumerate(zip(micro_batches, widths, strict=True))
    ]


def _pad(micro: MicroBatch, width: int, pad_id: int, index: int) -> PaddedMicroBatch:
    extra, device = width - micro.input_ids.shape[1], micro.input_ids.device
    input_ids = torch.nn.functional.pad(micro.input_ids, (0, extra), value=pad_id)
    if micro.attention_mask is not None:
        return PaddedMicroBatch(micro, input_ids, torch.arange(width, device=device), None, index)
    positions = torch.cat([micro.position_ids[0], torch.arange(extra, device=device)])
    lengths = [*micro.sequence_lengths.tolist(), *([extra] if extra else [])]
    return PaddedMicroBatch(micro, input_ids, positions, PackedLayout.from_lengths(lengths, device), index)
