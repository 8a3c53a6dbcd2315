"""compare.html: the verdict, the tables, a picture of who works when for each arm; one self-contained file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybridengine.compare import gantt
from hybridengine.compare.measured import Measured
from hybridengine.compare.result import HEADS, Report, cells, notes, phase_names, sentence
from hybridengine.report.html import figure_uri

PAGE_FILE = "compare.html"


def write_page(path: Path, report: Report, *, job: str) -> None:
    """Write the file, atomically.

    Args:
        job: the user's arguments, as one would type them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(report, job=job), encoding="utf-8")
    os.replace(temporary, path)


def render(report: Report, *, job: str) -> str:
    """The page; every text is escaped."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    best = report.rows[0].tokens_per_second
    phases = phase_names(report)
    return environment.get_template("template.html").render(
        report=report,
        sentence=sentence(report),
        notes=notes(report),
        line=f"hybridengine train {job} {report.override_lines[report.verdict.winner]}",
        heads=HEADS,
        rows=[(row.name == report.verdict.winner, cells(row, best)) for row in report.rows],
        phases=phases,
        phase_rows=[
            (row.name, [f"{row.seconds_per_phase.get(name, 0.0):.3g}" for name in phases]) for row in report.rows
        ],
        forecast_error=report.from_sync_max or report.simulator_error_max,
        pictures=pictures(report),
    )  # fmt: skip


def pictures(report: Report) -> list[tuple[str, str]]:
    """Name and data URI of each arm's picture, best arm first, all on the same seconds."""
    order = [row.name for row in report.rows]
    arms = sorted(report.last, key=lambda measured: order.index(measured.name))
    longest = max(end - start for start, end in map(gantt.window_of, arms))
    return [(arm.name, _picture(arm, longest)) for arm in arms]


def _picture(arm: Measured, seconds: float) -> str:
    def draw(figure: Any) -> None:
        gantt.draw(figure, [arm], seconds=seconds)

    return figure_uri(gantt.size_of([arm]), draw)
