"""Watch a run: alarms by rules on its metrics, and a warning when all rewards are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridengine.config import MonitorConfig, ParityConfig
from hybridengine.monitors.defaults import rules_of
from hybridengine.monitors.flat import FlatReward
from hybridengine.monitors.health import health
from hybridengine.types import Trajectory

#: Exit status of a run that an alarm stopped; its last state is saved and can be resumed.
STOPPED = 4


class Monitor:
    """Checks the metrics of a run on the rank that writes them; on other ranks it does nothing.

    Args:
        config: the ``monitor`` section.
        audits: names under ``reward.audit``.
        parity: the ``parity`` section, whose bounds on a step's mismatch are rules, too.
        log: prints a line for the user, such as the log_rank0 of a run.
        decode: token ids to text.
        active: whether this rank watches.

    Attributes:
        alarms: (step, rule, message) of every alarm of this process.
        stopped: an alarm has gone off, and ``monitor.action`` is ``stop``.

    Raises:
        ValueError: a rule that can't be read.
    """

    def __init__(
        self,
        config: MonitorConfig,
        *,
        audits: Iterable[str] = (),
        parity: ParityConfig | None = None,
        log: Callable[[str], None] = lambda text: None,
        decode: Callable[[list[int]], str] = str,
        active: bool = True,
    ) -> None:
        self._rules = rules_of(config, audits, parity)
        self._flat = FlatReward(decode)
        self._stops, self._log, self._active = config.action == "stop", log, active
        self.alarms: list[tuple[int, str, str]] = []
        self.stopped = False

    def resume(self, history: Iterable[Mapping[str, float]]) -> None:
        """Read the records of the run that is resumed, without repeating their alarms."""
        for record in history:
            for rule in self._rules:
                rule.see(record)

    def look(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of a training batch, see health.py; logs a warning when its rewards are all equal."""
        if not self._active:
            return {}
        if message := self._flat.look(step, trajectories):
            self._log(f"WARNING: {message}")
        return health(trajectories)

    def check(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Check a step's metrics against the rules; ``monitor/alarms``: how many bounds are crossed now."""
        if not self._active:
            return {}
        for rule in self._rules:
            if message := rule.see(record):
                self.alarms.append((step, rule.name, message))
                self._log(f"ALARM at step {step} ({rule.name}): {message}")
                self.stopped = self.stopped or self._stops or getattr(rule, "stops", False)
        return {"monitor/alarms": float(sum(rule.crossed for rule in self._rules))}
