"""report.png: learning curve, train/inference mismatch, seconds per phase, a timeline of steady steps, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.memory.tracker import PhaseMemory
from hybridengine.memory.waterfall import draw_waterfall
from hybridengine.report.summary import MISMATCH, wilson_interval
from hybridengine.tracing import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, float]

TIMELINE_STEPS = 3
#: Okabe and Ito's palette, distinguishable with colour-blindness, then others that differ from them and each other.
COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C6BB1", "#7F7F7F", "#A6761D",
    "#1B9E77", "#E7298A", "#66A61E", "#B15928", "#6A3D9A", "#FB9A99", "#33A02C", "#B2DF8A", "#1F3A5F", "#BCBD22",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#444444",
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "font.family": "DejaVu Sans",
}


def write_plot(
    path: Path,
    history: Sequence[Record],
    spans: Sequence[Span],
    *,
    title: str,
    memory: Sequence[PhaseMemory] = (),
    memory_limit: int | None = None,
) -> None:
    """Draw the report of a run.

    Args:
        history: the records of MetricLogger.
        spans: the spans of PhaseTimer, of one rank.
        memory: the phases of one step as MemoryTracker measured them; without any, their picture is left out.
        memory_limit: bytes there are.
    """
    # Figure without pyplot: no global state, no display, whatever backend the user's own code has chosen.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 11 if memory else 8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        # Rows of their own: a legend beside one plot must not narrow those above it.
        panels = figure.subfigures(3 if memory else 2, 1, squeeze=False)[:, 0]
        learning, mismatch = panels[0].subplots(1, 2)
        if memory:
            seconds = panels[1].subplots()
            timeline, waterfall = panels[2].subplots(1, 2)
            draw_waterfall(waterfall, memory, limit=memory_limit)
        else:
            seconds, timeline = panels[1].subplots(1, 2)
        steps = [record for record in history if record["step"] > 0]
        colors = phase_colors(steps, spans)
        draw_learning(learning, history)
        draw_mismatch(mismatch, steps)
        draw_seconds(seconds, steps, colors)
        draw_timeline(timeline, spans, steps, colors)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def draw_learning(ax: Axes, history: Sequence[Record]) -> None:
    ax.set_title("Reward and held-out accuracy")
    x, y = _series(history, "reward")
    if x:
        ax.plot(x, y, color="#56B4E9", linewidth=1.0, alpha=0.55 if len(x) > 8 else 1.0)
        ax.plot(x, _smooth(y), color="#0072B2", linewidth=2.0, label="reward (training, sampled)")
    x, y = _series(history, "validation/accuracy")
    if x:
        counts = [int(r.get("validation/samples", 0)) for r in history if "validation/accuracy" in r]
        errors = [_bars(value, n) for value, n in zip(y, counts, strict=True)]
        ax.errorbar(
            x,
            y,
            yerr=[[low for low, _ in errors], [high for _, high in errors]],
            color="#D55E00",
            marker="o",
            markersize=5,
            linewidth=1.6,
            elinewidth=1.0,
            capsize=2.5,
            label="validation accuracy (95 % interval)",
        )
    values = [r[name] for r in history for name in ("reward", "validation/accuracy") if name in r]
    if values and min(values) >= 0 and max(values) <= 1:
        ax.set_ylim(-0.03, 1.05)
    _finish(ax, "step")


def draw_mismatch(
    ax: Axes, steps: Sequence[Record], title: str = "Mismatch: |log-probability of rollout − of training|"
) -> None:
    ax.set_title(title)
    floor = 1e-9  # an exact zero has no place on a logarithmic axis
    for name, label, color in (
        (MISMATCH, "max over the step's tokens", "#CC79A7"),
        ("sampling/logp_difference/mean", "mean", "#009E73"),
    ):
        x, y = _series(steps, name)
        if x:
            ax.plot(x, [max(value, floor) for value in y], color=color, linewidth=1.6, label=label)
    if ax.lines:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 4)
    _finish(ax, "step")


def draw_seconds(ax: Axes, steps: Sequence[Record], colors: Mapping[str, str]) -> None:
    ax.set_title("Seconds per step, by phase")
    x = [record["step"] for record in steps]
    bottom = [0.0] * len(steps)
    for phase in colors:
        heights = [_phase_seconds(record, phase) for record in steps]
        if any(heights):
            ax.bar(x, heights, bottom=bottom, width=0.92, color=colors[phase], linewidth=0, label=phase)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    rest = [max(0.0, r.get("time/step", 0.0) - b) for r, b in zip(steps, bottom, strict=True)]
    if any(rest):
        ax.bar(x, rest, bottom=bottom, width=0.92, color="#D9D9D9", linewidth=0, label="unaccounted")
    totals = [record.get("time/step", 0.0) for record in steps]
    if len(totals) > 3:
        # The first step compiles: on its scale the others would be flat.
        ax.set_ylim(0, 1.15 * max(totals[1:]))
        if totals[0] > 1.15 * max(totals[1:]):
            ax.annotate(f" first step: {totals[0]:.1f} s", (x[0] + 0.5, 1.15 * max(totals[1:])), va="top", fontsize=8)
    _finish(ax, "step", legend=False)
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0)


def draw_timeline(ax: Axes, spans: Sequence[Span], steps: Sequence[Record], colors: Mapping[str, str]) -> None:
    chosen = _steady_steps(spans, steps)
    name = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]}–{chosen[-1]}" if chosen else "no steps"
    ax.set_title(f"Timeline of rank 0, {name}")
    shown = [span for span in spans if span.step in chosen and span.depth == 0 and span.thread == "main"]
    if not shown:
        _finish(ax, "seconds", legend=False)
        return
    origin = min(span.start for span in shown)
    rows = [phase for phase in colors if any(span.name == phase for span in shown)]
    rows.sort(key=lambda phase: min(span.start for span in shown if span.name == phase))
    for row, phase in enumerate(rows):
        bars = [(span.start - origin, span.seconds) for span in shown if span.name == phase]
        ax.broken_barh(bars, (row - 0.36, 0.72), facecolors=colors[phase], linewidth=0)
    for step in chosen:
        start = min(span.start for span in shown if span.step == step) - origin
        ax.axvline(start, color="#888888", linewidth=0.8, linestyle=(0, (3, 3)))
        ax.text(start, -0.75, f" {step}", fontsize=8, color="#666666", va="center")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.4, -1.05)
    ax.grid(axis="y", visible=False)
    _finish(ax, "seconds", legend=False)


def _steady_steps(spans: Sequence[Span], steps: Sequence[Record]) -> list[int]:
    """Consecutive steps around the middle of the run, without validation or checkpoint where there are such."""
    timed = sorted({span.step for span in spans if span.step is not None and span.step > 0})
    special = {span.step for span in spans if span.name in ("validation", "checkpoint")}
    middle = len(timed) // 2
    starts = range(len(timed) - TIMELINE_STEPS + 1)
    windows = [timed[i : i + TIMELINE_STEPS] for i in sorted(starts, key=lambda i: abs(i + 1 - middle))]
    for window in windows:
        if not special & set(window) and timed[0] not in window:
            return window
    return windows[0] if windows else timed


def phase_colors(steps: Sequence[Record], spans: Sequence[Span]) -> dict[str, str]:
    """Top-level phases by total seconds, longest first."""
    totals: dict[str, float] = {}
    for record in steps:
        for name, seconds in record.items():
            if name.startswith("time/") and name != "time/step":
                phase = name.removeprefix("time/").split("/")[0]
                totals[phase] = totals.get(phase, 0.0) + seconds
    for span in spans:
        if span.depth == 0 and span.step is not None and span.thread == "main":
            totals.setdefault(span.name, 0.0)
    ordered = sorted(totals, key=lambda phase: -totals[phase])
    return dict(zip(ordered, distinct_colors(len(ordered)), strict=True))


def distinct_colors(count: int) -> list[str]:
    """``count`` colours, no two alike: those above, then further ones around the circle of hues."""
    import colorsys

    found = list(COLORS[:count])
    for i in range(count - len(found)):
        # Steps of the golden ratio keep neighbours apart, however many there are.
        red, green, blue = colorsys.hls_to_rgb(i * 0.618034 % 1, 0.35 + 0.25 * (i % 3) / 2, 0.55)
        found.append(f"#{int(red * 255):02X}{int(green * 255):02X}{int(blue * 255):02X}")
    return found


def draw_curve(ax: Axes, steps: Sequence[Record], name: str, title: str) -> None:
    """One metric over the steps."""
    x, y = _series(steps, name)
    ax.set_title(title)
    ax.plot(x, y, color="#0072B2", linewidth=1.0, alpha=0.45 if len(x) > 8 else 1.0)
    if len(x) > 8:
        ax.plot(x, _smooth(y), color="#0072B2", linewidth=1.8)
    _finish(ax, "step", legend=False)


def _phase_seconds(record: Record, phase: str) -> float:
    return sum(s for name, s in record.items() if name == f"time/{phase}" or name.startswith(f"time/{phase}/"))


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    found = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a tenth of the run."""
    half = max(0, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _bars(accuracy: float, n: int) -> tuple[float, float]:
    if n < 1:
        return 0.0, 0.0
    low, high = wilson_interval(min(n, accuracy * n), n)
    return max(0.0, accuracy - low), max(0.0, high - accuracy)


def _finish(ax: Any, xlabel: str, *, legend: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(xlabel)
    if xlabel == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if not ax.has_data():
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", va="center", color="#888888")
    elif legend and ax.get_legend_handles_labels()[0]:
        ax.legend(loc="best")
