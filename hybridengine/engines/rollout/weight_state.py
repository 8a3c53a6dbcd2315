"""WeightState: whether a rollout engine's weights form a complete policy version."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hybridengine.engines.rollout.base import StaleWeightsError


class WeightState:
    """The version an engine serves, and what has arrived since ``begin``.

    Weights may come one parameter at a time (``mark_delivered``), or be written into the engine's tensors by a
    transfer that makes no call here. For the second way, memory that holds no weights yet (at the start, and after
    it was given up in sleep) is marked: the first element of each tensor is NaN until something is written.
    """

    def __init__(self) -> None:
        self.version = -1  # last complete version
        self.servable = False
        self._fresh = True  # memory holds no weights
        self._updating = False
        self._delivered: set[str] = set()

    def begin(self, live: Mapping[str, Tensor]) -> None:
        """Unservable from here until :meth:`finish`."""
        self.servable, self._updating = False, True
        self._delivered.clear()
        if self._fresh:
            for tensor in live.values():
                _first(tensor).fill_(float("nan"))

    def mark_delivered(self, name: str) -> None:
        """A canonical parameter has been loaded.

        Raises:
            RuntimeError: outside of an update.
        """
        if not self._updating:
            raise RuntimeError(f"parameter {name!r} came outside of begin_update() ... finish_update()")
        self._delivered.add(name)

    def check_complete(self, expected: Collection[str], live: Mapping[str, Tensor]) -> None:
        """Refuse an update that left a parameter without data.

        Args:
            expected: every canonical parameter.

        Raises:
            RuntimeError: something is missing, by name; the engine stays unservable.
        """
        if not self._updating:
            raise RuntimeError("finish_update() without begin_update()")
        missing = [name for name in expected if name not in self._delivered] if self._delivered else []
        if not missing and self._fresh:
            missing = [name for name, tensor in live.items() if bool(torch.isnan(_first(tensor)))]
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no data in this sync, first: {missing[0]}")

    def finish(self, version: int) -> None:
        """Servable at ``version``."""
        self.version, self.servable = version, True
        self._fresh = self._updating = False

    def lose(self) -> None:
        """The weights' memory is gone: nothing is served until a complete update."""
        self.version, self.servable = -1, False
        self._fresh, self._updating = True, False

    def check_servable(self) -> None:
        """Raise StaleWeightsError unless a complete version is there."""
        if not self.servable:
            raise StaleWeightsError(
                f"the rollout engine holds no complete policy version (last: {self.version}); sync before generating"
            )


def _first(tensor: Tensor) -> Tensor:
    """The first element, as a view."""
    return tensor[(0,) * tensor.dim()]
