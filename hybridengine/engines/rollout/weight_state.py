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
    it was given up in sleep) is marked: the first element of each tensor is a NaN that no arithmetic makes until
    something is written.
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
                _first(tensor).copy_(_mark(tensor))

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
            missing = [name for name, tensor in live.items() if _is_marked(tensor)]
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


#: By size: integers of that size, and the bits of the mark. Arithmetic and casts make NaNs with a mantissa of all ones,
#: or of one bit: a trained weight that is NaN is not taken for one that did not come.
_MARKS = {2: (torch.int16, 0x7FED), 4: (torch.int32, 0x7FEDC0DE), 8: (torch.int64, 0x7FFEDC0DE0000001)}


def _mark(tensor: Tensor) -> Tensor:
    """A scalar of the tensor's type."""
    if tensor.dtype.itemsize not in _MARKS or not tensor.dtype.is_floating_point:
        return torch.tensor(float("nan")).to(tensor.dtype)
    kind, bits = _MARKS[tensor.dtype.itemsize]
    return torch.tensor(bits, dtype=kind).view(tensor.dtype)


def _is_marked(tensor: Tensor) -> bool:
    if tensor.dtype.itemsize not in _MARKS or not tensor.dtype.is_floating_point:
        return bool(torch.isnan(_first(tensor)))
    kind, bits = _MARKS[tensor.dtype.itemsize]
    return int(_first(tensor).view(kind)) == bits
