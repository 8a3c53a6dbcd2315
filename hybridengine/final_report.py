"""Write report.html from the running process: at the end of a run, and when it fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.failure import describe
from hybridengine.report.html import REPORT_FILE, RunReport, write_report

if TYPE_CHECKING:
    from hybridengine.loop import Trainer

log = logging.getLogger(__name__)


def write_final_report(trainer: Trainer, summary: Mapping[str, Any], *, memory_limit: int | None) -> Path | None:
    """Write it on the first rank, by ``logging.report``; returns where."""
    if not trainer.world.is_main or not trainer.config.logging.report:
        return None
    path = Path(trainer.config.output_dir) / REPORT_FILE
    write_report(path, _live(trainer, summary=summary, memory_limit=memory_limit))
    return path


def report_failure(trainer: Trainer, error: BaseException) -> None:
    """Write it with the error on top, and close what the run wrote. Never raises: the error is what matters."""
    try:
        if trainer.world.is_main and trainer.config.logging.report:
            path = Path(trainer.config.output_dir) / REPORT_FILE
            write_report(path, _live(trainer, summary={}, error=describe(error)))
            trainer.logger.message(f"the run failed; what there is of it: {path}")
        trainer.logger.close()
    except Exception as caught:  # noqa: BLE001
        log.warning("the report of the failed run could not be written: %s: %s", type(caught).__name__, caught)


def _live(
    trainer: Trainer, *, summary: Mapping[str, Any], memory_limit: int | None = None, error: str | None = None
) -> RunReport:
    logger, phases = trainer.logger, trainer.phases
    return RunReport(
        name=trainer.config.name,
        history=logger.history,
        spans=phases.timer.spans,
        memory=phases.tracker.last_step,
        memory_limit=memory_limit,
        config=dataclasses.asdict(trainer.config),
        samples=logger.samples,
        summary={"total_steps": trainer.total_steps, **summary},
        warnings=logger.log_file.warnings,
        log=logger.log_file.read(),
        error=error,
    )
