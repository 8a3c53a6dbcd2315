"""Aliasing: where the bytes an engine tensor needs already lie here, in its dtype and strides, nothing is copied.

The engine's parameter is pointed at the trainer's memory: no copy, no second holding. An engine that can run
on foreign memory offers ``alias_tensor(name, tensor) -> bool``; it must then leave that memory alone when it
sleeps. Tensors that the engine fuses of several parameters or pads are never one of the trainer's, and are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from hybridengine.sync.plan.plan import Copy, ReshardPlan


class Alias(NamedTuple):
    """Rollout tensor ``target`` is training tensor ``source`` from element ``start`` on, with its own strides."""

    target: str
    source: str
    start: int

    def view(self, local: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        source, target = local[self.source], live[self.target]
        return torch.as_strided(source.detach(), target.size(), target.stride(), source.storage_offset() + self.start)


def find_aliases(plan: ReshardPlan, rank: int, live: Mapping[str, torch.Tensor]) -> dict[str, Alias]:
    """Rollout tensors that are, element for element, a strided view of one training tensor of this rank."""
    by_target: dict[str, list[Copy]] = defaultdict(list)
    for copy in plan.copies(rank):
        by_target[copy.target].append(copy)
    found = {}
    for target, copies in by_target.items():
        first = copies[0]
        delta = first.box.source_start - first.box.target_start
        same_walk = all(
            copy.is_local
            and copy.source == first.source
            and copy.source_dtype == copy.target_dtype
            and copy.box.source_strides == copy.box.target_strides
            and copy.box.source_start - copy.box.target_start == delta
            for copy in copies
        )
        if same_walk and delta >= 0 and sum(copy.box.numel for copy in copies) == live[target].numel():
            found[target] = Alias(target, first.source, delta)
    return found
