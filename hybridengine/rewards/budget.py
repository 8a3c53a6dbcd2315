"""How much time a rollout's scoring may lose to calls that never end."""

from __future__ import annotations

import threading

#: What a call gets at least, once the budget is used up: seconds, and multiples of what calls take that end.
FLOOR_SECONDS, FLOOR_FACTOR = 0.5, 5.0
#: Weight of the latest call in the average of those that end.
LATEST = 0.05


class TimeBudget:
    """The time limit of each call. Safe to use from several threads.

    One call may take its function's ``timeout_seconds``. Calls that took that long and gave nothing use up the budget
    of the rollout, and what is left of it is the limit of further ones; in the end FLOOR_SECONDS, or FLOOR_FACTOR times
    what calls of the function take that do end. So N samples of a model that has found out how to make a verifier hang
    cost about ``seconds + N * FLOOR_SECONDS`` of worker time rather than ``N * timeout_seconds``.

    Args:
        seconds: of one rollout.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._usual: dict[str, float] = {}  # function -> seconds of calls that end, on average
        self._lock = threading.Lock()

    def limit(self, name: str, timeout_seconds: float) -> float:
        """What a call of the function ``name`` may take now."""
        with self._lock:
            floor = max(FLOOR_SECONDS, FLOOR_FACTOR * self._usual.get(name, 0.0))
            return min(timeout_seconds, max(self._left, floor))

    def spend(self, seconds: float) -> None:
        """A call was given up after ``seconds``."""
        with self._lock:
            self._left -= seconds

    def ended(self, name: str, seconds: float) -> None:
        """A call of the function ``name`` ended by itself after ``seconds``."""
        with self._lock:
            usual = self._usual.get(name, seconds)
            self._usual[name] = usual + LATEST * (seconds - usual)

    def renew(self) -> None:
        """A new rollout begins."""
        with self._lock:
            self._left = self._seconds
