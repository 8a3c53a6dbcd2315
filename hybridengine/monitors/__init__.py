"""Watches a run: alarms by rules on its metrics, and a word when the reward says nothing."""

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
    """On the rank that writes the metrics; the others have one that sees nothing.

    Args:
        config: the ``monitor`` section.
        audits: names under ``reward.audit``.
        parity: the ``parity`` section, whose bounds on a step's mismatch are rules, too.
        say: prints for the user.
        decode: token ids to text.
        active: this rank watches.

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
        say: Callable[[str], None] = lambda text: None,
        decode: Callable[[list[int]], str] = str,
        active: bool = True,
    ) -> None:
        self._rules = rules_of(config, audits, parity)
        self._flat = FlatReward(decode)
        self._stops, self._say, self._active = config.action == "stop", say, active
        self.alarms: list[tuple[int, str, str]] = []
        self.stopped = False

    def resume(self, history: Iterable[Mapping[str, float]]) -> None:
        """Take in the records of a run that goes on; alarms among them are not repeated."""
        for record in history:
            for rule in self._rules:
                rule.see(record)

    def look(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of a training batch, see health.py; speaks up when its rewards are all equal."""
        if not self._active:
            return {}
        if message := self._flat.look(step, trajectories):
            self._say(f"WARNING: {message}")
        return health(trajectories)

    def check(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Hold a step's metrics against the rules; ``monitor/alarms``: how many bounds are crossed now."""
        if not self._active:
            return {}
        for rule in self._rules:
            if message := rule.see(record):
                self.alarms.append((step, rule.name, message))
                self._say(f"ALARM at step {step} ({rule.name}): {message}")
                self.stopped = self.stopped or self._stops or getattr(rule, "stops", False)
        return {"monitor/alarms": float(sum(rule.crossed for rule in self._rules))}
