"""The box copy on CUDA (csrc/boxes.cu): loading, and running a table on torch's current stream.

Tested on a GPU (tests/gpu) and, without one, on emulated threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from hybridengine import native_build
from hybridengine.native import BOX_DTYPE

_LIBRARY = Path(__file__).resolve().parent / "_boxes_cuda.so"


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        RuntimeError: not built, or built from other sources; says how to build it.
    """
    if not _LIBRARY.exists():
        raise RuntimeError(
            "weights are on CUDA but the CUDA box copy is not built: run `python -m hybridengine.native build-cuda` "
            "(needs nvcc), or use sync.method=gather"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    library.he_cuda_box_bytes.restype = ctypes.c_int64
    if library.he_cuda_box_bytes() != BOX_DTYPE.itemsize:
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
    """What there is, and the remedy where a GPU is here and the library isn't."""
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


def run_boxes(boxes: np.ndarray, sums: torch.Tensor | None, device: torch.device) -> None:
    """Enqueue all boxes of the table as one launch on the current stream of ``device``.

    Args:
        boxes: rows of native.BOX_DTYPE with device addresses.
        sums: int64 accumulators on ``device``, added to mod 2**64.

    The table is uploaded in the same stream from pageable memory, so it may be reused as soon as this returns.

    Raises:
        ValueError: unknown op, or a tee without a cast. RuntimeError: the launch failed.
    """
    if not len(boxes):
        return
    library = load()
    # Prepared boxes and tile starts lie behind each other, so that one upload brings both.
    count, width = len(boxes), BOX_DTYPE.itemsize
    memory = np.zeros(count * width + 8 * (count + 1), np.uint8)
    code = library.he_cuda_prepare(boxes.ctypes.data, count, memory.ctypes.data, memory.ctypes.data + count * width)
    if code:
        raise ValueError(f"box {code - 1} has an unknown op or a tee without a cast: {boxes[code - 1]}")
    tiles = int(memory[-8:].view(np.int64)[0])
    with torch.cuda.device(device):
        uploaded = torch.from_numpy(memory).to(device)
        stream = torch.cuda.current_stream(device)
        code = library.he_cuda_run_boxes(
            uploaded.data_ptr(),
            uploaded.data_ptr() + count * width,
            count,
            tiles,
            None if sums is None else sums.data_ptr(),
            stream.cuda_stream,
        )
    if code:
        raise RuntimeError(f"the box copy could not be launched: CUDA error {code}")
