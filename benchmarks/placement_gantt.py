"""Who works when: rank 0's phases above, the replicas' engines below, one row each; the same seconds for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.placement_arms import Measured
from hybridengine.report.plot import COLORS, STYLE

SHOWN_STEPS = 4
#: Waiting is drawn as what it is: nearly nothing.
WAITING = ("rollout", "drain")
PHASES = ("forward_backward", "sync", "old_logprobs", "optimizer", "exchange", "reward")


def draw(path: Path, arms: Sequence[Measured]) -> None:
    """One panel per arm, a few steps from the middle of its run, seconds on a common axis."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context(STYLE):
        rows = [1 + len(arm.replicas) for arm in arms]
        figure = Figure(figsize=(11, 0.6 + 0.36 * sum(rows) + 0.75 * len(arms)), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(arms), 1, squeeze=False, height_ratios=rows)[:, 0]
        windows = [_window(arm) for arm in arms]
        longest = max(end - start for start, end in windows)
        for ax, arm, (start, end) in zip(axes, arms, windows, strict=True):
            shown = [(name, max(a, start), min(b, end)) for name, a, b in arm.spans if b > start and a < end]
            for name, a, b in shown:
                color = _color(name, colocated=not arm.run.scenario.rollout_ranks)
                ax.broken_barh([(a - start, b - a)], (-0.38, 0.76), facecolors=color, linewidth=0)
            for row, found in enumerate(arm.replicas, start=1):
                bars = [(max(a, start) - start, min(b, end) - max(a, start)) for a, b in found if b > start and a < end]
                ax.broken_barh(bars, (row - 0.38, 0.76), facecolors=COLORS[0], linewidth=0)
            labels = ["rank 0" if not arm.run.scenario.rollout_ranks else "training"]
            ax.set_yticks(range(1 + len(arm.replicas)), labels + [f"replica {n}" for n in range(len(arm.replicas))])
            ax.set_ylim(len(arm.replicas) + 0.5, -0.5)
            ax.set_xlim(0, longest)
            ax.grid(axis="y", visible=False)
            ax.set_title(f"{arm.name}: {arm.run.seconds_per_step:.2f} s per step, {arm.idle_fraction:.0%} idle")
        axes[-1].set_xlabel(f"seconds; {SHOWN_STEPS} steps of each arm")
        legend = [Patch(color=COLORS[0], label="generation")]
        legend += [Patch(color=_color(name, colocated=True), label=name) for name in PHASES[:4]]
        legend += [Patch(color=_color("other", colocated=True), label="other"), Patch(color="#F2F2F2", label="waiting")]
        figure.legend(handles=legend, loc="outside upper right", ncols=len(legend), handlelength=1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _color(name: str, *, colocated: bool) -> str:
    if name == "rollout" and colocated:
        return COLORS[0]
    if name in WAITING or name == "exchange":
        return "#F2F2F2"
    return COLORS[1 + PHASES.index(name)] if name in PHASES[:4] else "#A0A0A0"


def _window(arm: Measured) -> tuple[float, float]:
    """From the start of a step in the middle of the run over SHOWN_STEPS steps, by the ends of optimizer steps."""
    ends = [end for name, _, end in arm.spans if name == "optimizer"]
    first = max(0, (len(ends) - SHOWN_STEPS) // 2)
    return ends[first], ends[min(first + SHOWN_STEPS, len(ends) - 1)]
