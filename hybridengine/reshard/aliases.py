"""Engine tensors whose every element this rank already holds, in the same dtype and order: no copy is needed."""

from __future__ import annotations

from typing import NamedTuple

from hybridengine.reshard.boxes import Ints
from hybridengine.reshard.plan import Copy, ReshardPlan
from hybridengine.reshard.strided import coalesce


class Alias(NamedTuple):
    """Engine tensor ``target`` may become a view of local training tensor ``source``.

    Element ``i`` of a box of ``sizes`` lies at ``i . target_strides`` in the engine tensor (from its first
    element) and at ``start + i . source_strides`` in the training tensor.

    Attributes:
        numel: elements covered. An engine tensor that is larger has padding and must not be aliased.
        params: canonical parameters inside, several for a fused tensor.
    """

    target: str
    source: str
    start: int
    sizes: Ints
    target_strides: Ints
    source_strides: Ints
    numel: int
    params: tuple[str, ...]

    @property
    def same_strides(self) -> bool:
        """The memory layout is the same too, so that every kernel accepts the alias."""
        return self.target_strides == self.source_strides


def alias_candidates(plan: ReshardPlan, rank: int) -> dict[str, Alias]:
    """By engine tensor: where the whole of it lies in one local training tensor, as one strided box."""
    by_target: dict[str, list[Copy]] = {}
    for copy in plan.copies(rank):
        by_target.setdefault(copy.target, []).append(copy)
    found = {target: _alias(target, copies) for target, copies in by_target.items()}
    return {target: alias for target, alias in found.items() if alias is not None}


def _alias(target: str, copies: list[Copy]) -> Alias | None:
    first = copies[0]
    if any(not c.is_local or c.source != first.source or c.source_dtype != c.target_dtype for c in copies):
        return None
    # Which canonical element it is does not matter here: let the target's walk stand in for the index.
    boxes = coalesce(
        copy.box._replace(index_start=copy.box.target_start, index_strides=copy.box.target_strides) for copy in copies
    )
    if len(boxes) != 1 or boxes[0].target_start != 0:
        return None
    box = boxes[0]
    params = tuple(dict.fromkeys(copy.param for copy in copies))
    return Alias(
        target, first.source, box.source_start, box.sizes, box.target_strides, box.source_strides, box.numel, params
    )
