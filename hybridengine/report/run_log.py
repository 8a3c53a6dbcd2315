"""run.log: every line that a run logs, including details that the console leaves out, and its warnings."""

from __future__ import annotations

import logging
import time
from pathlib import Path

LOG_FILE = "run.log"


class RunLog(logging.Handler):
    """Appends to ``output_dir/run.log``. As a logging handler it also takes the package's warnings,
    which go to stderr as well.

    Attributes:
        warnings: the distinct warnings, in order.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(level=logging.WARNING)
        self.warnings: list[str] = []
        self._path = directory / LOG_FILE
        self._console = (
            logging.StreamHandler()
        )  # a logger with a handler of its own leaves stderr to whoever asks for it
        self._console.setLevel(logging.WARNING)
        for handler in (self, self._console):
            logging.getLogger("hybridengine").addHandler(handler)
        self.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}")

    def write(self, text: str) -> None:
        """Add a line, or several."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def read(self) -> str:
        """Everything so far."""
        return self._path.read_text(encoding="utf-8") if self._path.is_file() else ""

    def warn(self, text: str) -> None:
        """A line that the report shows under its warnings."""
        if text not in self.warnings:
            self.warnings.append(text)
        self.write(f"warning: {text}")

    def emit(self, record: logging.LogRecord) -> None:
        self.warn(record.getMessage())

    def close(self) -> None:
        for handler in (self, self._console):
            logging.getLogger("hybridengine").removeHandler(handler)
        super().close()
