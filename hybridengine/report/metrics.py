"""Metrics of a run: console, JSONL, TensorBoard and, by option, Weights & Biases. Only rank 0 writes.

Names, as users of TRL and verl know them:

    reward  reward_std  frac_reward_zero_std  completions/{mean_length,max_length,clipped_ratio}
    loss  grad_norm  lr  kl  kl_max  entropy  clip_ratio/{low,high}  skipped_updates
    sampling/{logp_difference/mean,logp_difference/max,importance_weight,effective_sample_size,chi2,kl,...}
    dynamic_sampling/{replaced,flat}_groups
    time/{phase}  time/step  perf/{tokens_per_second,unaccounted}  validation/{accuracy,reward}
    sync/{count,bytes_received,bytes_local,bytes_aliased,seconds,wait_seconds,fingerprint_seconds}
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from hybridengine.config import LoggingConfig
from hybridengine.distributed.world import World
from hybridengine.report.completions import file_of, write_completions
from hybridengine.report.run_log import RunLog
from hybridengine.report.samples import SAMPLES_FILE, Sample, append_samples, choose_samples, read_samples, to_sample
from hybridengine.types import Trajectory

#: Phases shorter than this share of the step are left out of the console line (they are in the files).
SHOWN_SHARE = 0.04
#: Metrics on the console line after reward and accuracy: label, name, form.
SHOWN = (
    ("length", "completions/mean_length", "{:.1f}"),
    ("loss", "loss", "{:.4f}"),
    ("kl", "kl", "{:.4f}"),
    ("lr", "lr", "{:.1e}"),
)
METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"


class MetricLogger:
    """Writes one record per step.

    Call :meth:`resume` once, then :meth:`log` for steps 1, 2, ... Validation before the first step is step 0,
    written by :meth:`validation`; later validations are part of their step's record.

    Attributes:
        history: every record of the run so far (rank 0 only), those from before a resumption included.
        samples: responses shown so far, those from before a resumption included.

    Raises:
        ValueError: ``logging.wandb_project`` is set and the wandb package is missing (on every rank).
    """

    def __init__(
        self,
        config: LoggingConfig,
        output_dir: Path | str,
        world: World,
        total_steps: int,
        *,
        console: Console | None = None,
        run_config: Mapping[str, Any] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"logging.wandb_project={config.wandb_project!r} needs the wandb package: "
                "pip install wandb, or leave logging.wandb_project=null"
            )
        self.history: list[dict[str, float]] = []
        self.samples: list[Sample] = []
        self.console = console or Console(highlight=False)
        self._config = config
        self._directory = Path(output_dir)
        self._total_steps = total_steps
        self._run_config = run_config
        self._decode = decode
        self._main = world.is_main
        self._validates = bool((run_config or {}).get("validate_every", 0))
        self._file: IO[str] | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._bar: Progress | None = None
        self._open = False
        self._log: RunLog | None = None

    # -- lifetime ----------------------------------------------------------------------------------

    def resume(self, step: int, *, unlogged: Mapping[str, float] | None = None) -> None:
        """Open the sinks; ``step`` is the last one already trained (0: a fresh start).

        ``unlogged``: what its checkpoint knows of that step; it becomes the record where a kill came before the log.

        Records of later steps, left by a run that died after its last checkpoint, are removed, so that no step
        appears twice.
        """
        if not self._main:
            return
        if self._open:
            raise ValueError(f"resume({step}) after the first record was written")
        self._open = True
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._run_config is not None:
            (self._directory / CONFIG_FILE).write_text(json.dumps(self._run_config, indent=2) + "\n")
        self.samples = read_samples(self._directory / SAMPLES_FILE, up_to=step) if step else []
        (self._directory / SAMPLES_FILE).unlink(missing_ok=True)
        append_samples(self._directory / SAMPLES_FILE, self.samples)
        if self._config.jsonl:
            path = self._directory / METRICS_FILE
            self.history = _truncate(path, step)
            self._file = path.open("a")
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._directory / "tensorboard"), purge_step=step + 1 if step else 0)
        if self._config.wandb_project is not None:
            self._wandb = self._start_wandb()
        # Not where another run's checkpoint is resumed: its records are not here either.
        if unlogged and (self.history[-1]["step"] if self.history else 0) == step - 1:
            self._write(step, unlogged)
        if self._config.console and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.add_task("steps", total=self._total_steps, completed=step)
            self._bar.start()

    def close(self) -> None:
        """Flush and close every sink; harmless when called twice."""
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._log is not None:
            self._log.close()
        self._bar = self._file = self._tensorboard = self._wandb = None

    # -- records -----------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of one step; steps must increase."""
        if not self._main:
            return
        self._write(step, metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        if self._config.console:
            self.message(step_line(step, self._total_steps, self.history[-1]))

    def validation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory] = ()) -> None:
        """Show a validation and some of its responses.

        At step 0 it is also written as a record; at later steps the caller merges ``metrics`` into :meth:`log`.
        """
        if not self._main:
            return
        if step == 0:
            self._write(0, metrics)
        if self._config.console:
            if "validation/accuracy" in metrics:
                count = metrics.get("validation/samples")
                of = f" over {count:.0f} responses" if count else ""
                self.message(f"validation at step {step}: accuracy {metrics['validation/accuracy']:.3f}{of}")
        if trajectories and self._config.completions:
            self._keep(file_of(self._directory, step, validation=True), trajectories, step)
        self._show_samples(step, trajectories)

    def rollout(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Keep the responses that step ``step`` trains on, by ``logging.completions``.

        Where nothing is validated, some of them are shown instead, ten times in the run.
        """
        if not self._main:
            return
        if self._config.completions and step % self._config.completions == 0:
            self._keep(file_of(self._directory, step), trajectories, step)
        if not self._validates and (step == 1 or step % max(1, self._total_steps // 10) == 0):
            self._show_samples(step, trajectories)

    def message(self, text: str | Text) -> None:
        """Print above the progress bar, on rank 0; never interpreted as markup and never re-wrapped."""
        if self._main:
            self.console.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)
            self.log_file.write(str(text))

    def detail(self, text: str) -> None:
        """What only ``logging.verbose`` prints; run.log has it in any case."""
        if self._main and self._config.verbose:
            self.message(text)
        elif self._main:
            self.log_file.write(text)

    def warn(self, text: str) -> None:
        """Print, and show under the report's warnings."""
        if self._main:
            self.console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
            self.log_file.warn(text)

    @property
    def log_file(self) -> RunLog:
        """run.log; opened when the first line is written."""
        if self._log is None:
            self._log = RunLog(self._directory)
        return self._log

    def _keep(self, path: Path, trajectories: Sequence[Trajectory], step: int) -> None:
        write_completions(path, trajectories, self._decode or str, step=step)

    def _show_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        chosen = choose_samples(trajectories, self._config.samples, step=step)
        samples = [to_sample(trajectory, self._decode, step=step) for trajectory in chosen]
        if not samples:
            return
        self.samples += samples
        append_samples(self._directory / SAMPLES_FILE, samples)
        if self._config.console:
            for sample in samples:
                self.message(sample_text(sample))
        if self._wandb is not None:
            self._wandb.log({"samples": wandb_table(samples)}, step=step)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._open:
            self.resume(0)
        if self.history and step <= self.history[-1]["step"]:
            raise ValueError(f"step {step} was logged already (last: {self.history[-1]['step']:.0f})")
        record = {"step": step} | {name: float(value) for name, value in metrics.items()}
        self.history.append(record)
        if self._file is not None:
            self._file.write(_json_line(record))
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in record.items():
                if name != "step":
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in record.items() if name != "step"}, step=step)

    def _start_wandb(self) -> Any:
        import wandb

        return wandb.init(
            project=self._config.wandb_project,
            name=str((self._run_config or {}).get("name", self._directory.name)),
            dir=str(self._directory),
            id=_wandb_id(self._directory / "wandb_id"),
            resume="allow",
            config=dict(self._run_config or {}),
        )


def sample_text(sample: Sample) -> Text:
    """A response on two lines, with a mark for right or wrong."""
    reward = "?" if sample.reward is None else f"{sample.reward:.3g}"
    text = Text()
    text.append("  ✓ " if sample.right else "  ✗ ", style="green" if sample.right else "red")
    text.append("prompt   ", style="dim").append(_shorten(sample.prompt) + "\n")
    text.append("    response ", style="dim").append(_shorten(sample.response))
    text.append(f"   (answer {_shorten(sample.answer, 60)}, reward {reward})", style="dim")
    return text


def wandb_table(samples: Sequence[Sample]) -> Any:
    """The samples as a Weights & Biases table."""
    import wandb

    names = ("step", "right", "prompt", "response", "answer", "reward")
    return wandb.Table(columns=[*names], data=[[getattr(sample, name) for name in names] for sample in samples])


def step_line(step: int, total_steps: int, record: Mapping[str, float]) -> Text:
    """One step on one line; what was not measured is left out.

    >>> step_line(3, 60, {"reward": 0.5, "loss": -0.0312, "lr": 3e-4, "time/step": 1.0, "time/rollout": 0.7}).plain
    'step  3/60  reward 0.500  loss -0.0312  lr 3.0e-04  1.00s (rollout 0.70)'
    """
    text = Text(f"step {step:>{len(str(total_steps))}}/{total_steps}", style="bold")
    add = text.append
    if "reward" in record:
        add("  reward ", "dim").append(f"{record['reward']:.3f}", "cyan")
    if "validation/accuracy" in record:
        add("  accuracy ", "dim").append(f"{record['validation/accuracy']:.3f}", "bold green")
    for label, name, form in SHOWN:
        if name in record:
            add(f"  {label} ", "dim").append(form.format(record[name]), "not bold")
    if "time/step" in record:
        add(f"  {record['time/step']:.2f}s", "not bold")
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in top_level_seconds(record).items())
        if phases:
            add(f" ({phases})", "not bold dim")
    if "perf/tokens_per_second" in record:
        add(f"  {_thousands(record['perf/tokens_per_second'])} tok/s", "not bold")
    if "sampling/logp_difference/max" in record:
        add("  mismatch ", "dim").append(f"{record['sampling/logp_difference/max']:.1e}", "not bold")
    return text


def top_level_seconds(record: Mapping[str, float]) -> dict[str, float]:
    """Top-level phases with their nested ones added, in order, without the short ones."""
    sums: dict[str, float] = {}
    for name, seconds in record.items():
        if name.startswith("time/") and name != "time/step":
            phase = name.removeprefix("time/").split("/")[0]
            sums[phase] = sums.get(phase, 0.0) + seconds
    least = SHOWN_SHARE * record.get("time/step", 0.0)
    return {name: seconds for name, seconds in sums.items() if seconds >= least}


def _truncate(path: Path, step: int) -> list[dict[str, float]]:
    """Keep the records up to ``step`` (none for 0: step 0 is validated anew), atomically; return them.

    A process killed while writing leaves an incomplete last line, which is dropped.
    """
    kept: list[dict[str, float]] = []
    if path.exists() and step > 0:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                if number == len(lines) - 1:
                    break
                raise ValueError(
                    f"{path}, line {number + 1}: not a JSON record; remove the file to start anew"
                ) from None
            if record["step"] <= step:
                kept.append({name: math.nan if value is None else value for name, value in record.items()})
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(_json_line(record) for record in kept))
    os.replace(temporary, path)
    return kept


def _json_line(record: Mapping[str, float]) -> str:
    """JSON has no NaN or infinity: such a value becomes null."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in record.items()}) + "\n"


def _wandb_id(path: Path) -> str:
    """The run's id, kept beside its output so that a resumed run continues the same curves."""
    if not path.exists():
        import uuid

        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _shorten(text: str, limit: int = 160) -> str:
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"
