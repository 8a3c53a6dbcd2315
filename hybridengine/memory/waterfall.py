"""A bar chart of memory per phase: each owner, the rest of the peak, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridengine.memory.residency import OWNERS
from hybridengine.memory.tracker import GIB, PhaseMemory

#: Okabe and Ito's palette; one colour per owner in every picture.
COLORS = dict(
    zip(
        OWNERS,
        ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#8C6BB1", "#A6761D", "#E69F00", "#D55E00", "#CC79A7"),
        strict=True,
    )
)


def as_rows(phases: Sequence[PhaseMemory]) -> list[dict[str, Any]]:
    """What the picture shows, for summary.json: GiB used and at most, per owner here and elsewhere."""
    return [
        {
            "phase": run.name,
            "used_gib": run.used / GIB,
            "peak_gib": run.peak / GIB,
            "owners_gib": {owner: size / GIB for owner, size in run.owners.items()},
            "elsewhere_gib": {owner: size / GIB for owner, size in run.asleep.items()},
        }
        for run in phases
    ]


def draw_waterfall(ax: Any, phases: Sequence[PhaseMemory], *, limit: int | None = None) -> None:
    """Stacked bars, one per top-level phase in order; the rest of each peak (activations, buffers) is grey.

    Args:
        ax: matplotlib axes.
        phases: of one step, ``MemoryTracker.last_step``; of a phase that ran several times, its largest peak counts.
        limit: bytes there are, drawn as a line unless it is so far away that the bars would be flat.
    """
    largest: dict[str, PhaseMemory] = {}
    for run in phases:
        if "/" not in run.name and run.peak >= largest.setdefault(run.name, run).peak:
            largest[run.name] = run
    shown = list(largest.values())
    ax.set_title("Memory of rank 0 by phase: owners, and the peak")
    ax.set_ylabel("GiB")
    positions = range(len(shown))
    bottom = [0.0] * len(shown)
    for owner in OWNERS:
        heights = [run.owners.get(owner, 0) / GIB for run in shown]
        if any(heights):
            ax.bar(positions, heights, bottom=bottom, width=0.7, color=COLORS[owner], linewidth=0, label=owner)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    rest = [max(0.0, run.peak / GIB - b) for run, b in zip(shown, bottom, strict=True)]
    ax.bar(positions, rest, bottom=bottom, width=0.7, color="#D9D9D9", linewidth=0, label="other, at the peak")
    for x, run in zip(positions, shown, strict=True):
        ax.text(x, run.peak / GIB, f"{run.peak / GIB:.3g}", ha="center", va="bottom", fontsize=8)
    ax.margins(y=0.1)
    if limit is not None and 4 * max((run.peak for run in shown), default=0) > limit:
        ax.axhline(limit / GIB, color="#B00020", linewidth=1.2, linestyle=(0, (4, 3)), label="limit")
    ax.set_xticks(list(positions), [run.name for run in shown], rotation=25, ha="right")
    ax.grid(axis="x", visible=False)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0)
