"""Who works when: the first rank's phases above, the replicas' engines below, one row each; the same seconds for every
arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridengine.compare.measured import WAITING, Measured
from hybridengine.report.plot import COLORS, STYLE

SHOWN_STEPS = 4
PHASES = ("forward_backward", "sync", "old_logprobs", "optimizer")
#: Waiting is drawn as what it is: nearly nothing.
EMPTY, OTHER = "#F2F2F2", "#A0A0A0"


def write_png(path: Path, arms: Sequence[Measured]) -> None:
    """One panel per arm, a few steps from the middle of its run, seconds on a common axis."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size_of(arms), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, arms)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def size_of(arms: Sequence[Measured]) -> tuple[float, float]:
    """Inches."""
    rows = sum(1 + len(arm.replicas) for arm in arms)
    return 11, 0.6 + 0.36 * rows + 0.75 * len(arms)


def draw(figure: Any, arms: Sequence[Measured], *, seconds: float | None = None) -> None:
    """Into a matplotlib figure. ``seconds``: length of the axis; default: of the longest arm here."""
    from matplotlib.patches import Patch

    axes = figure.subplots(len(arms), 1, squeeze=False, height_ratios=[1 + len(arm.replicas) for arm in arms])[:, 0]
    windows = [window_of(arm) for arm in arms]
    longest = seconds or max(end - start for start, end in windows)
    for ax, arm, window in zip(axes, arms, windows, strict=True):
        _panel(ax, arm, window)
        ax.set_xlim(0, longest)
    axes[-1].set_xlabel(f"seconds; {SHOWN_STEPS} steps")
    legend = [Patch(color=COLORS[0], label="generation")]
    legend += [Patch(color=_color(name, colocated=True), label=name) for name in PHASES]
    legend += [Patch(color=OTHER, label="other"), Patch(color=EMPTY, label="waiting")]
    figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), handlelength=1.0)


def _panel(ax: Any, arm: Measured, window: tuple[float, float]) -> None:
    start, end = window
    colocated = not arm.run.scenario.rollout_ranks
    for name, a, b in arm.spans:
        if b > start and a < end:
            left, right = max(a, start), min(b, end)
            ax.broken_barh(
                [(left - start, right - left)], (-0.38, 0.76), facecolors=_color(name, colocated=colocated), linewidth=0
            )
    for row, found in enumerate(arm.replicas, start=1):
        bars = [(max(a, start) - start, min(b, end) - max(a, start)) for a, b in found if b > start and a < end]
        ax.broken_barh(bars, (row - 0.38, 0.76), facecolors=COLORS[0], linewidth=0)
    labels = ["rank 0" if colocated else "training", *(f"replica {n}" for n in range(len(arm.replicas)))]
    ax.set_yticks(range(1 + len(arm.replicas)), labels)
    ax.set_ylim(len(arm.replicas) + 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(f"{arm.name}: {arm.run.seconds_per_step:.3g} s per step, {arm.idle_share:.0%} idle")


def _color(name: str, *, colocated: bool) -> str:
    if name == "rollout" and colocated:
        return COLORS[0]
    if name in WAITING or name == "exchange":
        return EMPTY
    return COLORS[1 + PHASES.index(name)] if name in PHASES else OTHER


def window_of(arm: Measured) -> tuple[float, float]:
    """SHOWN_STEPS steps in the middle of the run, from one optimizer step's end to another's."""
    ends = [end for name, _, end in arm.spans if name == "optimizer"]
    first = max(0, (len(ends) - SHOWN_STEPS) // 2)
    return ends[first], ends[min(first + SHOWN_STEPS, len(ends) - 1)]
