"""From a plan's copies to box tables: addresses filled in, checked against the real tensors, replayable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridengine import native, platform
from hybridengine.platform.base import Sums
from hybridengine.sync.plan.boxes import Ints, contiguous_strides
from hybridengine.sync.plan.plan import Copy, ReshardPlan
from hybridengine.sync.transfer.base import LayoutChangedError
from hybridengine.sync.transfer.fingerprint import Ledger, Read

Address = Callable[[str], int]  # tensor name -> byte address of its first element
Source = Address | Mapping[str, torch.Tensor]


class _Aim:
    """Rows of a table whose addresses follow tensors by name."""

    def __init__(self, names: Sequence[str | None], offsets: Sequence[int]) -> None:
        self.names = sorted({name for name in names if name is not None})
        place = {name: i for i, name in enumerate(self.names)}
        moving = [i for i, name in enumerate(names) if name is not None]
        self._rows = np.array(moving, np.int64)
        self._which = np.array([place[names[i]] for i in moving], np.int64)  # type: ignore[index]
        self._offsets = np.array([offsets[i] for i in moving], np.uint64)

    def write(self, column: np.ndarray, tensors: Mapping[str, torch.Tensor]) -> None:
        if len(self._rows):
            bases = np.array([tensors[name].data_ptr() for name in self.names], np.uint64)
            column[self._rows] = bases[self._which] + self._offsets


class BoxTable:
    """Boxes whose tensors may move between syncs (sleep frees memory, wake allocates other).

    Attributes:
        boxes: rows for native.run_boxes.
        nbytes: bytes written by one run.
    """

    def __init__(
        self,
        boxes: np.ndarray,
        sources: _Aim,
        targets: _Aim,
        nbytes: int,
        device: torch.device,
        stores: native.Stores = native.Stores.BY_SIZE,
    ) -> None:
        self.boxes, self.nbytes, self.stores = boxes, nbytes, stores
        self._device, self._platform = device, platform.of(device)
        self._run = self._platform.box_runner(device, stores)
        self._sources, self._targets = sources, targets

    def aim(self, live: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor] | None = None) -> None:
        """Fill in where the rollout tensors are now and, when given, this rank's training tensors."""
        self._targets.write(self.boxes["dst"], live)
        if local is not None:
            self._sources.write(self.boxes["src"], local)

    def run(self, sums: Sums, begin: int = 0, end: int | None = None) -> None:
        """Copy rows ``begin`` to ``end`` and add fingerprints to ``sums``, on the table's device. On CUDA: enqueue."""
        self._run(self.boxes[begin:end], sums)

    def finish(self) -> None:
        """Return once the copies have been made."""
        self._platform.finish_boxes(self._device)


class _Row(NamedTuple):
    src: int
    dst: int
    tee: int
    dims: tuple[Ints, Ints, Ints]
    canonical: tuple[int, Ints]
    op: int
    slots: tuple[int, int]


class TableBuilder:
    """Collects rows for one BoxTable on ``device``. ``ledger`` None leaves fingerprints out.

    A source is an Address, which stays as it is, or this rank's own tensors, which :meth:`BoxTable.aim` follows.
    """

    def __init__(self, ledger: Ledger | None, device: torch.device) -> None:
        self._ledger, self._device = ledger, device
        self._sources: list[str | None] = []
        self._source_offsets: list[int] = []
        self._rows: list[_Row] = []
        self._targets: list[str | None] = []
        self._offsets: list[int] = []
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def copy(self, item: Copy, source: Source, *, count_source: bool = False, count_target: bool = True) -> None:
        """Tensor to live tensor. ``count_source``: this read also serves as the trainer's side of the proof."""
        box, source_dtype, target_dtype = item.box, _dtype(item.source_dtype), _dtype(item.target_dtype)
        self._add(
            self._from(source, item.source, box.source_start * source_dtype.itemsize),
            item.target,
            box.target_start * target_dtype.itemsize,
            (box.sizes, box.source_strides, box.target_strides),
            (box.index_start, box.index_strides),
            native.copy_op(source_dtype, target_dtype),
            self._slots(item.param, source=count_source, target=count_target),
            box.numel * target_dtype.itemsize,
        )

    def reread(self, item: Copy, source: Source, *, count_source: bool) -> None:
        """Sum, without copying, what an aliased live tensor shares with the trainer."""
        self.copy(item, source, count_source=count_source)
        self._targets[-1], self._nbytes = None, self._nbytes - item.nbytes

    def pack(self, item: Copy, source: Source, target_address: int, *, count_source: bool = False) -> None:
        """Tensor to staging memory, densely, in the rollout dtype."""
        box, source_dtype, target_dtype = item.box, _dtype(item.source_dtype), _dtype(item.target_dtype)
        self._add(
            self._from(source, item.source, box.source_start * source_dtype.itemsize),
            None,
            target_address,
            (box.sizes, box.source_strides, contiguous_strides(box.sizes)),
            (box.index_start, box.index_strides),
            native.copy_op(source_dtype, target_dtype),
            self._slots(item.param, source=count_source, target=False),
            box.numel * target_dtype.itemsize,
        )

    def copy_and_pack(self, item: Copy, source: Source, target_address: int, *, count_source: bool) -> None:
        """Tensor to live tensor and, as the same bytes, densely to staging memory: one reading for both. Casts only."""
        self.copy(item, source, count_source=count_source)
        self._rows[-1] = self._rows[-1]._replace(tee=target_address)

    def unpack(self, item: Copy, source_address: int, *, count_target: bool = True) -> None:
        """Staging memory to live tensor."""
        box, dtype = item.box, _dtype(item.target_dtype)
        self._add(
            self._from(lambda name: source_address, "", 0),
            item.target,
            box.target_start * dtype.itemsize,
            (box.sizes, contiguous_strides(box.sizes), box.target_strides),
            (box.index_start, box.index_strides),
            native.copy_op(dtype, dtype),
            self._slots(item.param, source=False, target=count_target),
            box.numel * dtype.itemsize,
        )

    def read(self, item: Read, source: Source, dtype: str, as_dtype: str, *, slot: int) -> None:
        """Sum a box without writing it, as it would be after a cast to ``as_dtype``."""
        kind = _dtype(dtype)
        self._add(
            self._from(source, item.tensor, item.start * kind.itemsize),
            None,
            0,
            (item.sizes, item.strides, (0,) * len(item.sizes)),
            (item.index, item.index_strides),
            native.copy_op(kind, _dtype(as_dtype)),
            (slot, -1),
            0,
        )

    def build(self, stores: native.Stores = native.Stores.BY_SIZE) -> BoxTable:
        boxes = native.new_boxes(len(self._rows))
        for box, row in zip(boxes, self._rows, strict=True):
            box["src"], box["dst"], box["tee"] = row.src, row.dst, row.tee
            box["op"], box["slot"], box["index"] = row.op, row.slots, row.canonical[0]
            native.set_dims(box, *row.dims, row.canonical[1])
        sources, targets = _Aim(self._sources, self._source_offsets), _Aim(self._targets, self._offsets)
        return BoxTable(boxes, sources, targets, self._nbytes, self._device, stores)

    def _from(self, source: Source, name: str, offset: int) -> int:
        """The address to read at, now; notes whether it follows a tensor."""
        follows = isinstance(source, Mapping)
        self._sources.append(name if follows else None)
        self._source_offsets.append(offset)
        return (source[name].data_ptr() if isinstance(source, Mapping) else source(name)) + offset

    def _slots(self, param: str, *, source: bool, target: bool) -> tuple[int, int]:
        if self._ledger is None:
            return -1, -1
        return (
            self._ledger.target_slot(param) if target else -1,
            self._ledger.source_slot(param) if source else -1,
        )

    def _add(
        self,
        src: int,
        target: str | None,
        offset: int,
        dims: tuple[Ints, Ints, Ints],
        index: tuple[int, Ints],
        op: int,
        slots: tuple[int, int],
        nbytes: int,
    ) -> None:
        self._rows.append(_Row(src, offset if target is None else 0, 0, dims, index, op, slots))
        self._targets.append(target)
        self._offsets.append(offset)
        self._nbytes += nbytes


def check_copies(
    plan: ReshardPlan, rank: int, local: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> None:
    """Check the tensors of both engines against the plan: names, dtypes, and that every box lies inside.

    Raises:
        ValueError: naming the tensors that are missing, never written, of another dtype, or too small.
    """
    copies, sends = plan.copies(rank), plan.sends(rank)
    faults = []
    reads = {copy.source for copy in (*sends, *(c for c in copies if c.is_local))}
    writes = {copy.target for copy in copies}
    for what, names in (
        ("the plan reads training tensors that do not exist", reads - local.keys()),
        ("the plan writes rollout tensors that do not exist", writes - live.keys()),
        ("rollout tensors that no part of the plan writes", live.keys() - writes),
    ):
        if names:
            faults.append(f"{what}: {_some(names)}")
    wrong: dict[str, str] = {}
    for copy in copies:
        if copy.target in live:
            _check_side(wrong, "rollout", copy.target, live[copy.target], copy.target_dtype, copy.box.target_start,
                        copy.box.sizes, copy.box.target_strides)  # fmt: skip
    for copy in (*sends, *(c for c in copies if c.is_local)):
        if copy.source in local:
            _check_side(wrong, "training", copy.source, local[copy.source], copy.source_dtype, copy.box.source_start,
                        copy.box.sizes, copy.box.source_strides)  # fmt: skip
    faults += wrong.values()
    if faults:
        raise ValueError("the engines' tensors do not fit the reshard plan: " + "; ".join(faults[:10]))


def _check_side(
    wrong: dict[str, str], side: str, name: str, tensor: torch.Tensor, dtype: str, start: int,
    sizes: Sequence[int], strides: Sequence[int],
) -> None:  # fmt: skip
    last = start + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.dtype != _dtype(dtype):
        wrong[name] = f"{side} tensor {name} is {tensor.dtype}, planned as {dtype}"
    elif not tensor.numel() or last >= extent:
        wrong[name] = (
            f"{side} tensor {name} of shape {list(tensor.shape)} ends at element {extent if tensor.numel() else 0}, "
            f"the plan reaches element {last}"
        )


class TensorWatch:
    """Remembers what tensors were at setup; refuses to run when one has become something else."""

    def __init__(self, side: str, tensors: Mapping[str, torch.Tensor], names: Iterable[str], *, fixed: bool) -> None:
        self._side, self._fixed = side, fixed
        self._known = {name: self._state(tensors[name]) for name in names}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise LayoutChangedError naming the first tensor that is gone or has another shape, stride, dtype
        (or, for ``fixed`` ones, address)."""
        for name, known in self._known.items():
            now = self._state(tensors[name]) if name in tensors else None
            if now != known:
                raise LayoutChangedError(
                    f"{self._side} tensor {name} changed since the transfer was set up: "
                    f"was {known[:3]}, is {'gone' if now is None else now[:3]}"
                    f"{' at another address' if now and now[:3] == known[:3] else ''}; set it up again"
                )

    def _state(self, tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, int]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() if self._fixed else 0


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """The one device all tensors are on; the CPU when there are none. Raises ValueError for a mixture."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"the engine's tensors are on several devices: {sorted(map(str, devices))}")
    return next(iter(devices), torch.device("cpu"))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in the reshard plan")
    return found


def _some(names: Iterable[str], limit: int = 8) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")
