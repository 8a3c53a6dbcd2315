"""The box copy on CUDA (csrc/boxes.cu): loading, and running a table on torch's current stream.

Tested on a GPU (tests/gpu) and, without one, on emulated threads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hybridengine import native_build
from hybridengine.native import BOX_DTYPE, same_weights

_LIBRARY = Path(__file__).resolve().parent / "_boxes_cuda.so"


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        RuntimeError: not built, or built from other sources; the message names the build command.
    """
    if not _LIBRARY.exists():
        raise RuntimeError(
            "weights are on CUDA but the CUDA box copy is not built: run `python -m hybridengine.native build-cuda` "
            "(needs nvcc), or use sync.method=gather"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    library.he_cuda_box_bytes.restype = ctypes.c_int64
    if library.he_cuda_box_bytes() != BOX_DTYPE.itemsize or not same_weights(library, "he_cuda_weight"):
        raise RuntimeError(f"{_LIBRARY} was built from other sources: run `python -m hybridengine.native build-cuda`")
    library.he_cuda_prepare.restype = ctypes.c_int64
    library.he_cuda_prepare.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    library.he_cuda_run_boxes.restype = ctypes.c_int32
    library.he_cuda_run_boxes.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return library


def status() -> tuple[str, str]:
    """Whether the library is built, and how to build it where this machine has a GPU."""
    if not torch.cuda.is_available():
        return f"{'built' if _LIBRARY.exists() else 'not built'}; no CUDA here, so it is not needed", ""
    try:
        load()
    except (RuntimeError, OSError) as error:
        what = f"built, but {error}".split(": run ")[0] if _LIBRARY.exists() else "not built"
        return what, "python -m hybridengine.native build-cuda (needs nvcc), or use sync.method=gather"
    return "built", ""


def build(arch: str = "native") -> Path:
    """Compile for this machine's GPU. Raises as native_build.compile_cuda does."""
    return native_build.compile_cuda(native_build.source_dir(), _LIBRARY, arch=arch)


class DeviceTable:
    """Boxes in device memory, in steps of one launch each.

    Args:
        boxes: rows of native.BOX_DTYPE with device addresses; they may change until the next :meth:`upload`.
        bounds: step k is the rows from ``bounds[k]`` to ``bounds[k + 1]``.
    """

    def __init__(self, boxes: np.ndarray, bounds: Sequence[int], device: torch.device) -> None:
        self._boxes, self._bounds, self._device = boxes, tuple(bounds), device
        self._host = np.zeros(0, np.uint8)
        self._uploaded: torch.Tensor | None = None
        self._tiles: list[int] = []

    def upload(self) -> None:
        """Bring the rows to the device where they have changed. Waits for what is on the current stream.

        Raises:
            ValueError: unknown op, or a tee without a cast.
        """
        width, library = BOX_DTYPE.itemsize, load()
        # Every step's prepared boxes and tile starts lie behind each other, so that one upload brings all.
        memory = np.zeros(len(self._boxes) * width + 8 * (len(self._boxes) + len(self._bounds) - 1), np.uint8)
        at, tiles = 0, []
        for begin, end in itertools.pairwise(self._bounds):
            starts = at + (end - begin) * width
            rows, here = self._boxes[begin:end], memory.ctypes.data
            code = library.he_cuda_prepare(rows.ctypes.data, end - begin, here + at, here + starts)
            if code:
                raise ValueError(f"box {code - 1} has an unknown op or a tee without a cast: {rows[code - 1]}")
            at = starts + 8 * (end - begin + 1)
            tiles.append(int(memory[at - 8 : at].view(np.int64)[0]))
        if self._uploaded is None or not np.array_equal(memory, self._host):
            self._host, self._tiles = memory, tiles
            self._uploaded = torch.from_numpy(memory).to(self._device)

    def run(self, step: int, sums: torch.Tensor | None) -> None:
        """Enqueue one step on the device's current stream; ``sums``: int64 accumulators there, added to mod 2**64.

        Raises:
            RuntimeError: the launch failed.
        """
        assert self._uploaded is not None, "not uploaded"
        if not self._tiles[step]:
            return
        width, (begin, end) = BOX_DTYPE.itemsize, self._bounds[step : step + 2]
        place = self._uploaded.data_ptr() + (begin - self._bounds[0]) * (width + 8) + 8 * step
        code = load().he_cuda_run_boxes(
            place,
            place + (end - begin) * width,
            end - begin,
            self._tiles[step],
            None if sums is None else sums.data_ptr(),
            torch.cuda.current_stream(self._device).cuda_stream,
        )
        if code:
            raise RuntimeError(f"the box copy could not be launched: CUDA error {code}")


def run_boxes(boxes: np.ndarray, sums: torch.Tensor | None, device: torch.device) -> None:
    """Enqueue all boxes as one launch on the current stream of ``device``; the array may be reused at once.

    Args:
        boxes: rows of native.BOX_DTYPE with device addresses.
        sums: int64 accumulators on ``device``, added to mod 2**64.

    Raises:
        ValueError: unknown op, or a tee without a cast. RuntimeError: the launch failed.
    """
    if len(boxes):
        table = DeviceTable(boxes, (0, len(boxes)), device)
        table.upload()
        table.run(0, sums)
