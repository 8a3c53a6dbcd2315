"""Run the arms of a comparison: interleaved, within the budget, going on where an earlier attempt stopped."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from hybridengine.compare.arms import Arm
from hybridengine.compare.launch import Result, read_result, start
from hybridengine.compare.measured import Measured, measure
from hybridengine.compare.plan import Plan, Settings, estimate, within_budget
from hybridengine.config.schema import ConfigError

SETTINGS_FILE = "settings.json"
#: A run may take this many times what was expected of it, and never less than the seconds below.
PATIENCE, LEAST_SECONDS = 5.0, 180.0


@dataclass(slots=True)
class Runs:
    """What has been run.

    Attributes:
        rounds: arm -> its measured runs.
        failed: arm -> the error of the first run that failed; it is not run again.
        left_out: arm -> why it was not run.
        seconds: arm -> seconds of each of its runs, failed ones too.
    """

    rounds: dict[str, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def spent(self) -> float:
        return sum(sum(values) for values in self.seconds.values())

    def add(self, result: Result, directory: Path, *, warmup: int) -> None:
        """Take in a run that has ended."""
        self.seconds[result.arm].append(result.seconds)
        if result.status != 0:
            self.failed.setdefault(result.arm, result.error)
            return
        try:
            found = measure(
                result.arm, directory, skip=warmup, host_gib=result.host_gib, device_gib=result.device_gib,
                load_average=result.load_average,
            )  # fmt: skip
        except ValueError as error:
            self.failed.setdefault(result.arm, str(error))
            return
        self.rounds.setdefault(result.arm, []).append(found)


class Comparison:
    """The runs of one comparison, in ``settings.out``.

    Args:
        method: the user's sync.method.
        launch: starts one run; replaced in tests.
        before: called before each run; the benchmark waits for a quiet machine.

    Raises:
        ConfigError: the directory holds another comparison.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        console: Console,
        *,
        method: str = "auto",
        launch: Callable[..., Result] = start,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.settings, self.plan, self.console = settings, plan, console
        self.runs = Runs(left_out=dict(plan.left_out))
        self._launch, self._before = launch, before
        self._method = method
        self._job = [*_config_dirs(settings.config_dirs), *settings.job, f"steps={settings.total_steps}"]
        check_settings(settings)

    def run(self) -> Runs:
        """All rounds, as far as the budget goes."""
        self._collect()
        arms = list(self.plan.arms)
        if not self.runs.rounds:  # the first run that succeeds tells how long the others will take
            arms = self._pilot(arms)
        arms, rounds = self._select(arms)
        self._show(arms, rounds)
        with self._progress() as advance:
            for number in range(rounds):
                for arm in arms if number % 2 == 0 else reversed(arms):
                    if self._done(arm, number) or arm.name in self.runs.failed:
                        continue
                    if number and self.runs.spent + self._expected(arm) > 60 * self.settings.minutes:
                        self.console.print(f"round {number + 1}: no time left for {arm.name}")
                        continue
                    with advance(arm, number, self._expected(arm)):
                        self._run(arm, number)
        return self.runs

    # -- parts -------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """What an earlier attempt has finished."""
        for arm in self.plan.arms:
            for number in range(self.settings.rounds):
                directory = self.directory(arm, number)
                if (result := read_result(directory)) is not None:
                    self.runs.add(result, directory, warmup=self.settings.warmup)
        if self.runs.seconds:
            done = sum(len(values) for values in self.runs.seconds.values())
            self.console.print(f"{self.settings.out}: going on after {done} runs, {self.runs.spent / 60:.1f} minutes")

    def _pilot(self, arms: Sequence[Arm]) -> list[Arm]:
        for arm in arms:
            if arm.name in self.runs.failed:
                continue
            self.console.print(f"first {arm.name}, which tells how long the others will take")
            self._run(arm, 0)
            if self.runs.rounds:
                return list(arms)
        raise ConfigError(_all_failed(self.runs.failed))

    def _select(self, arms: Sequence[Arm]) -> tuple[list[Arm], int]:
        alive = [arm for arm in arms if arm.name not in self.runs.failed]
        spent = {name: sum(values) for name, values in self.runs.seconds.items()}
        failed = sum(spent[name] for name in self.runs.failed)
        kept, rounds = within_budget(
            alive, self._expected, rounds=self.settings.rounds, seconds=60 * self.settings.minutes - failed, spent=spent
        )
        for arm in alive:
            if arm not in kept and arm.name not in self.runs.rounds:
                needed = rounds * sum(self._expected(other) for other in alive) / 60
                self.runs.left_out[arm.name] = (
                    f"no time within --minutes {self.settings.minutes:g}; all arms would take about {needed:.0f}"
                )
        return kept, rounds

    def _expected(self, arm: Arm) -> float:
        pilot = next(((name, found[0].run) for name, found in self.runs.rounds.items()), None)
        return estimate(arm, self.runs.seconds, pilot, steps=self.settings.total_steps) or LEAST_SECONDS

    def _done(self, arm: Arm, number: int) -> bool:
        return read_result(self.directory(arm, number)) is not None

    def _run(self, arm: Arm, number: int) -> None:
        self._before()
        left = 60 * self.settings.minutes - self.runs.spent
        known = bool(self.runs.rounds)
        limit = max(LEAST_SECONDS, PATIENCE * self._expected(arm)) if known else max(LEAST_SECONDS, left)
        directory = self.directory(arm, number)
        result = self._launch(arm, self._job, directory, method=self._method, round=number, timeout=limit)
        self.runs.add(result, directory, warmup=self.settings.warmup)
        if arm.name in self.runs.failed:
            reason = self.runs.failed[arm.name].splitlines() or ["no message"]
            self.console.print(f"[bold red]failed[/] {arm.name} after {result.seconds:.0f} s: ", end="")
            self.console.print(reason[-1], markup=False)
        else:
            found = self.runs.rounds[arm.name][-1]
            self.console.print(
                f"round {number + 1} {arm.name}: {found.run.seconds_per_step:.3g} s per step, "
                f"{found.run.tokens_per_second:,.0f} tokens/s ({result.seconds:.0f} s in all)"
            )

    def directory(self, arm: Arm, number: int) -> Path:
        """Of one run."""
        return self.settings.out / "runs" / arm.name / f"round-{number + 1}"

    # -- what the user sees ------------------------------------------------------------------------

    def _show(self, arms: Sequence[Arm], rounds: int) -> None:
        table = Table(title="plan", title_justify="left")
        for head in ("arm", "seconds a run", ""):
            table.add_column(head, justify="right" if head == "seconds a run" else "left")
        for arm in arms:
            table.add_row(arm.name, f"{self._expected(arm):.0f}", "")
        for name, reason in self.runs.left_out.items():
            table.add_row(f"[dim]{name}[/]", "", f"[dim]left out: {_short(reason)}[/]")
        for name, reason in self.runs.failed.items():
            table.add_row(f"[red]{name}[/]", "", f"[red]failed: {_short(reason)}[/]")
        self.console.print(table)
        total = rounds * sum(self._expected(arm) for arm in arms)
        self.console.print(
            f"{len(arms)} arms × {rounds} round(s) × ({self.settings.warmup} + {self.settings.steps} steps): about "
            f"{total / 60:.1f} of {self.settings.minutes:g} minutes, {self.runs.spent / 60:.1f} of them done"
        )

    @contextmanager
    def _progress(self) -> Iterator[Callable[[Arm, int, float], AbstractContextManager[None]]]:
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn(),
            console=self.console, transient=True,
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=60 * self.settings.minutes)

            @contextmanager
            def advance(arm: Arm, number: int, expected: float) -> Iterator[None]:
                bar.update(task, description=f"round {number + 1} {arm.name}", total=self._planned(number))
                over = threading.Event()
                ticker = threading.Thread(
                    target=_tick, args=(bar, task, self.runs.spent, expected, over), daemon=True
                )  # fmt: skip
                ticker.start()
                try:
                    yield
                finally:
                    over.set()
                    ticker.join()

            yield advance

    def _planned(self, number: int) -> float:
        """Seconds of everything that will be run, as it looks now."""
        left = 0.0
        for arm in self.plan.arms:
            if arm.name in self.runs.failed or arm.name in self.runs.left_out:
                continue
            missing = sum(not self._done(arm, n) for n in range(self.settings.rounds))
            left += missing * self._expected(arm)
        return self.runs.spent + left


def _tick(bar: Progress, task: TaskID, spent: float, expected: float, over: threading.Event) -> None:
    began = time.monotonic()
    while not over.wait(0.5):
        bar.update(task, completed=spent + min(expected, time.monotonic() - began))


def check_settings(settings: Settings) -> None:
    """Write down what is compared, or refuse a directory that holds something else.

    Raises:
        ConfigError: naming what differs.
    """
    path = settings.out / SETTINGS_FILE
    mine = settings.identity()
    if path.is_file():
        theirs = json.loads(path.read_text())
        changed = [f"{name} was {theirs.get(name)}, now {value}" for name, value in mine.items()
                   if theirs.get(name) != value]  # fmt: skip
        if changed:
            raise ConfigError(
                f"{settings.out} holds another comparison: {'; '.join(changed)}.\n  --out DIR gives this one a "
                "directory of its own; remove the old one to replace it"
            )
        return
    if settings.out.is_dir() and any(settings.out.iterdir()):
        raise ConfigError(f"--out {settings.out}: not empty, and no comparison; give a directory of its own")
    settings.out.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(mine, indent=2) + "\n")
    os.replace(temporary, path)


def _config_dirs(config_dirs: Sequence[Path]) -> list[str]:
    return [word for directory in config_dirs for word in ("--config-dir", str(directory))]


def _all_failed(failed: dict[str, str]) -> str:
    reasons = list(dict.fromkeys(failed.values()))
    if len(reasons) == 1:
        return f"every arm failed, with the same error:\n{reasons[0]}"
    return "every arm failed:\n" + "\n".join(f"{name}: {_short(reason)}" for name, reason in failed.items())


def _short(reason: str) -> str:
    lines = reason.splitlines()
    return f"{lines[-1]}" if lines else "no message"
