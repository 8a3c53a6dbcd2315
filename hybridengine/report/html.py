"""report.html: one self-contained file with a run's curves, phases, memory, samples, configuration and warnings.

    python -m hybridengine.report.html outputs/run      write it again from what the run left, also after a kill

It is written at the end of a run, and when a run fails, with the error on top.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.config import Config, text_of, walk
from hybridengine.config.help import default_text
from hybridengine.memory.tracker import GIB, PhaseMemory
from hybridengine.memory.waterfall import draw_waterfall
from hybridengine.report.run_log import LOG_FILE
from hybridengine.report.samples import SAMPLES_FILE, Sample, read_samples
from hybridengine.report.summary import MISMATCH, SUMMARY_FILE, TRACE_FILE, mean_of
from hybridengine.tracing import Span

REPORT_FILE = "report.html"
Record = Mapping[str, float]

#: Smaller curves below the learning curve: metric, title.
CURVES = (
    ("loss", "Loss"),
    ("grad_norm", "Gradient norm"),
    ("kl", "KL against the reference"),
    ("entropy", "Entropy"),
    ("completions/mean_length", "Response length, tokens"),
    ("completions/clipped_ratio", "Responses cut at the limit"),
    ("reward_std", "Spread of the reward"),
    ("frac_reward_zero_std", "Groups with equal rewards"),
    ("lr", "Learning rate"),
)


@dataclass(slots=True, kw_only=True)
class RunReport:
    """What the report shows.

    Attributes:
        history: the records of MetricLogger.
        spans: phases of the first rank; memory: the phases of its last step; memory_limit: bytes there are.
        config: the run's configuration, as nested dictionaries.
        warnings: what was warned of while it ran.
        log: run.log.
        error: what ended it; None where it ended by itself.
    """

    name: str
    history: Sequence[Record] = ()
    spans: Sequence[Span] = ()
    memory: Sequence[PhaseMemory] = ()
    memory_limit: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    log: str = ""
    error: str | None = None


def write_report(path: Path, run: RunReport) -> None:
    """Write the file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(run), encoding="utf-8")
    os.replace(temporary, path)


def render(run: RunReport) -> str:
    """The page; text of prompts and responses is escaped."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    return environment.get_template("template.html").render(
        run=run,
        facts=_facts(run),
        pictures=_pictures(run),
        warnings=[*run.warnings, *find_warnings(run.history)],
        samples=sorted(run.samples, key=lambda sample: (-sample.step, not sample.right)),
        changed=[key for key in _keys(run.config) if key["changed"]],
        keys=_keys(run.config),
    )


def find_warnings(history: Sequence[Record]) -> list[str]:
    """What in a run's numbers deserves a look, in words."""
    steps = [record for record in history if record["step"] > 0]
    if not steps:
        return []
    found = []
    rewards = [record["reward"] for record in steps if "reward" in record]
    if rewards and len(set(rewards)) == 1 and len(rewards) > 1:
        found.append(f"the reward was {rewards[0]:g} in every step: nothing to learn from")
    last = steps[-max(1, len(steps) // 10) :]
    shares = (
        ("frac_reward_zero_std", 0.8, "{:.0%} of the last groups had equal rewards, which teach nothing"),
        ("completions/clipped_ratio", 0.3, "{:.0%} of the last responses were cut at rollout.max_tokens"),
        ("perf/unaccounted", 0.2, "{:.0%} of the last steps' time lies in no phase"),
    )
    for name, limit, text in shares:
        if (value := mean_of(last, name)) is not None and value > limit:
            found.append(text.format(value))
    worst = max((record[MISMATCH] for record in steps if MISMATCH in record), default=0.0)
    if worst > 0.1:
        found.append(f"rollout and training differed by up to {worst:.2g} in a log-probability")
    unsound = [
        f"{name} in step {record['step']:.0f}"
        for record in steps
        for name, value in record.items()
        if not math.isfinite(value)
    ]
    if unsound:
        found.append(f"not a finite number: {', '.join(unsound[:5])}{' and more' if len(unsound) > 5 else ''}")
    return found


def _facts(run: RunReport) -> list[tuple[str, str]]:
    """What stands on top: label and value."""
    summary, facts = run.summary, []
    steps = [record for record in run.history if record["step"] > 0]
    total = summary.get("total_steps") or run.config.get("steps")
    facts.append(("steps", f"{steps[-1]['step']:.0f}" + (f" of {total}" if total else "") if steps else "none"))
    validated = [record for record in run.history if "validation/accuracy" in record]
    if validated:
        first, last = validated[0], validated[-1]
        facts.append(("accuracy", f"{first['validation/accuracy']:.3f} → {last['validation/accuracy']:.3f}"))
    if steps and "reward" in steps[-1]:
        facts.append(("reward", f"{steps[0].get('reward', math.nan):.3f} → {steps[-1]['reward']:.3f}"))
    for label, name, form in (
        ("total", "seconds_total", "{:.0f} s"),
        ("a step", "seconds_per_step", "{:.2f} s"),
        ("throughput", "tokens_per_second", "{:,.0f} tokens/s"),
        ("max |Δ logprob|", "max_logp_difference", "{:.1e}"),
        ("ranks", "world_size", "{}"),
        ("device", "device", "{}"),
        ("commit", "commit", "{:.10}"),
    ):
        if (value := summary.get(name)) is not None:
            facts.append((label, form.format(value)))
    return facts


def _pictures(run: RunReport) -> list[dict[str, str]]:
    """Title and data URI of each picture; what was not measured has none."""
    from hybridengine.report import plot

    steps = [record for record in run.history if record["step"] > 0]
    colors = plot.phase_colors(steps, run.spans)
    drawn: list[tuple[str, tuple[float, float], Callable[[Any], None]]] = [
        ("Reward and accuracy", (9, 3.6), lambda ax: plot.draw_learning(ax, run.history)),
    ]
    for name, title in CURVES:
        if any(name in record for record in steps):
            draw = functools.partial(plot.draw_curve, steps=steps, name=name, title=title)
            drawn.append((title, (4.4, 2.4), draw))
    if any(MISMATCH in record for record in steps):
        drawn.append(("Mismatch", (4.4, 2.4), lambda ax: plot.draw_mismatch(ax, steps, title="|Δ logprob|")))
    if steps:
        drawn.append(("Seconds per step", (9, 3.2), lambda ax: plot.draw_seconds(ax, steps, colors)))
    if run.spans:
        drawn.append(("Timeline", (9, 3.6), lambda ax: plot.draw_timeline(ax, run.spans, steps, colors)))
    if run.memory:
        drawn.append(("Memory", (9, 3.6), lambda ax: draw_waterfall(ax, run.memory, limit=run.memory_limit)))
    return [
        {"title": title, "uri": _as_uri(size, draw), "wide": "wide" if size[0] > 5 else ""}
        for title, size, draw in drawn
    ]


def _as_uri(size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    return figure_uri(size, lambda figure: draw(figure.subplots()))


def figure_uri(size: tuple[float, float], draw: Callable[[Any], None]) -> str:
    """The drawing as an image inside the page: SVG, so that it is sharp at every size.

    Args:
        size: inches.
        draw: into the matplotlib figure that it is given.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from hybridengine.report.plot import STYLE

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "hybridengine"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _keys(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every key with its value, its default and whether they differ."""
    rows = []
    for path, item in walk():
        node: Any = config
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        default = default_text(item)
        if default == f"outputs/${{{'name'}}}":
            default = f"outputs/{config.get('name', Config.name)}"
        value = text_of(node)
        rows.append({"name": path, "value": value, "default": default, "help": item.metadata["help"],
                     "changed": value != default})  # fmt: skip
    return rows if config else []


# -- from what a run left --------------------------------------------------------------------------


def read_run(directory: Path) -> RunReport:
    """What a run's directory has, however the run ended.

    Raises:
        ValueError: there is no run in it.
    """
    from hybridengine.report.metrics import CONFIG_FILE, METRICS_FILE

    config = _json(directory / CONFIG_FILE)
    if not config:
        raise ValueError(f"{directory}: no {CONFIG_FILE}; give a run's output_dir")
    summary, trace = _json(directory / SUMMARY_FILE), _json(directory / TRACE_FILE)
    log = directory / LOG_FILE
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    return RunReport(
        name=str(config.get("name", directory.name)),
        history=_history(directory / METRICS_FILE),
        spans=_spans(trace),
        memory=_memory(summary),
        config=config,
        samples=read_samples(directory / SAMPLES_FILE),
        summary=summary,
        warnings=list(dict.fromkeys(line[9:] for line in text.splitlines() if line.startswith("warning: "))),
        log=text,
        error=None if summary else "the run left no summary: it is still going, or it was killed",
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _history(path: Path) -> list[Record]:
    """The records; null, which stands for NaN, is NaN again. A last line cut short is left out."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        records.append({name: math.nan if value is None else value for name, value in record.items()})
    return records


def _spans(trace: Mapping[str, Any]) -> list[Span]:
    """The first rank's phases out of trace.json."""
    events = trace.get("traceEvents", [])
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    return [
        Span(
            name=event["args"]["path"],
            start=event["ts"] / 1e6,
            end=(event["ts"] + event["dur"]) / 1e6,
            step=event["args"]["step"],
            thread=threads.get(event["tid"], "main"),
        )
        for event in events
        if event.get("cat") == "phase" and event["pid"] == 0
    ]


def _memory(summary: Mapping[str, Any]) -> list[PhaseMemory]:
    def in_bytes(gib: Mapping[str, float]) -> dict[str, int]:
        return {owner: int(value * GIB) for owner, value in gib.items()}

    return [
        PhaseMemory(
            name=row["phase"],
            used=int(row["used_gib"] * GIB),
            peak=int(row["peak_gib"] * GIB),
            owners=in_bytes(row["owners_gib"]),
            asleep=in_bytes(row["elsewhere_gib"]),
        )
        for row in summary.get("memory") or []
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.report.html",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's output_dir")
    parser.add_argument("--out", type=Path, help=f"default: {REPORT_FILE} in it")
    given = parser.parse_args(arguments)
    try:
        out = given.out or given.run / REPORT_FILE
        write_report(out, read_run(given.run))
    except ValueError as error:
        sys.stderr.write(f"hybridengine.report.html: {error}\n")
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
