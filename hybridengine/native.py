"""The native box copy: loading, building, and the plain-torch twin that serves where there is no compiler.

A *box table* is a numpy array of :data:`BOX_DTYPE`, one row per strided rectangle (``csrc/boxes.h``). It is
made once per plan and replayed by :func:`run_boxes` at every weight sync, in one call.

    python -m hybridengine.native build         compiles the library next to this file; so does the installation
    python -m hybridengine.native build-cuda    compiles the one for this machine's GPU; needs nvcc
    python -m hybridengine.native status        which of them, and of SGLang's environment, are here, with remedies
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import logging
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

from hybridengine.native_build import compile_cpu, source_dir
from hybridengine.sync.plan.boxes import contiguous_strides

log = logging.getLogger(__name__)

MAX_DIMS = 4
#: One row per box; mirrors ``struct HeBox``. Addresses in bytes, strides in elements.
BOX_DTYPE = np.dtype(
    [
        ("src", np.uint64),
        ("dst", np.uint64),
        ("tee", np.uint64),
        ("sizes", np.int64, MAX_DIMS),
        ("src_strides", np.int64, MAX_DIMS),
        ("dst_strides", np.int64, MAX_DIMS),
        ("index", np.int64),
        ("index_strides", np.int64, MAX_DIMS),
        ("slot", np.int32, 2),
        ("op", np.int32),
        ("reserved", np.int32),
    ]
)
#: 32-bit words of a parameter whose weights share their 64-bit part; kRun in csrc/weights.h.
RUN = 1024
F32_TO_BF16 = 4
_WORDS = {0: torch.uint8, 1: torch.int16, 2: torch.int32, 3: torch.int64}
_MASKS = {0: 0xFF, 1: 0xFFFF, 2: 0xFFFF_FFFF, 3: -1}
_PACKAGE = Path(__file__).resolve().parent


def copy_op(source: torch.dtype, target: torch.dtype) -> int:
    """Operation code for copying ``source`` elements to ``target`` elements.

    Raises:
        ValueError: the pair is neither equal nor float32 to bfloat16.
    """
    if source == target:
        return {1: 0, 2: 1, 4: 2, 8: 3}[source.itemsize]
    if (source, target) == (torch.float32, torch.bfloat16):
        return F32_TO_BF16
    raise ValueError(f"weights can be copied as they are or cast float32 -> bfloat16, not {source} -> {target}")


def new_boxes(count: int) -> np.ndarray:
    """A table of ``count`` one-element boxes that touch nothing and are not fingerprinted."""
    boxes = np.zeros(count, BOX_DTYPE)
    boxes["sizes"] = 1
    boxes["slot"] = -1
    return boxes


def set_dims(box: np.void, sizes: Sequence[int], src: Sequence[int], dst: Sequence[int], index: Sequence[int]) -> None:
    """Fill in the dimensions of one row, padded in front. Raises ValueError beyond MAX_DIMS dimensions."""
    dims = len(sizes)
    if dims > MAX_DIMS:
        raise ValueError(f"a box has {dims} dimensions {tuple(sizes)}; at most {MAX_DIMS} are supported")
    if dims:
        box["sizes"][-dims:], box["index_strides"][-dims:] = sizes, index
        box["src_strides"][-dims:], box["dst_strides"][-dims:] = src, dst


class Stores(IntEnum):
    """Whether what a batch writes stays in the processor's caches; mirrors ``enum HeStores``."""

    BY_SIZE = 0
    STREAMED = 1


def run_boxes(
    boxes: np.ndarray,
    sums: np.ndarray | None = None,
    *,
    threads: int | None = None,
    stores: Stores = Stores.BY_SIZE,
) -> None:
    """Copy, cast and fingerprint all boxes of the table.

    Args:
        boxes: rows of BOX_DTYPE. ``dst == 0`` only reads; ``tee`` is a second, dense destination of a cast.
            Destinations must not overlap.
        sums: uint64 accumulators, added to mod 2**64 at each box's slots; needed when a box names a slot.
        threads: at most this many; default ``torch.get_num_threads()``.
        stores: of a few MiB or more, streamed past the caches, unless the caller knows better.

    Raises:
        ValueError: unknown op, a tee without a cast, slot out of range, or a table of another layout.
        MemoryError: for the work list; nothing has been copied.
    """
    if not len(boxes):
        return
    check_boxes(boxes, sums)
    library = load()
    if library is None:
        _run_torch(boxes, sums)
        return
    threads = torch.get_num_threads() if threads is None else threads
    where = None if sums is None else sums.ctypes.data
    code = library.he_run_boxes(boxes.ctypes.data, len(boxes), where, threads, stores)
    if code < 0:
        raise MemoryError(f"no memory for the work list of {len(boxes)} boxes")
    if code:
        raise ValueError(f"box {code - 1} has an unknown op or a tee without a cast: {boxes[code - 1]}")


class LaneRow(ctypes.Structure):
    """Mirrors ``struct HeLane``; what its addresses point to is the caller's to keep alive."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("boxes", "box_bounds", "words", "word_bounds", "marks", "signal")],
        *[(name, ctypes.c_int64) for name in ("steps", "at", "stores")],
    ]


def run_lanes(
    rows: ctypes.Array[LaneRow], base: int, sums: np.ndarray | None, *, threads: int | None = None, idle_us: int = 50
) -> bool:
    """Take the steps of all lanes as far as their gates allow, one of each lane in turn. Needs the library.

    Args:
        rows: their ``at`` moves on.
        base: what ``marks`` and signals are counted from.
        sums: as for :func:`run_boxes`; the tables must have been checked against it (:func:`check_boxes`).
        idle_us: give up once nothing has moved for so many microseconds.

    Returns:
        Whether all lanes are at their end.
    """
    library = load()
    assert library is not None
    threads = torch.get_num_threads() if threads is None else threads
    where = None if sums is None else sums.ctypes.data
    code = library.he_run_lanes(rows, len(rows), base, where, threads, idle_us)
    if code == 3:
        raise MemoryError("no memory for the work list of a step")
    if code > 1:
        raise ValueError("a box of a lane has an unknown op or a tee without a cast")
    return code == 0


def status() -> tuple[str, str]:
    """Which implementation is in use, and how to build the library where it is missing or outdated."""
    try:
        found = implementation()
    except (RuntimeError, OSError) as error:
        return str(error).split(": run ")[0], "python -m hybridengine.native build"
    slow = "python -m hybridengine.native build (needs a C++ compiler): weight syncs are several times slower without"
    return found, slow if found == "torch" else ""


def implementation() -> str:
    """``"c++"``, or ``"torch"`` where the library has not been built."""
    return "torch" if load() is None else "c++"


# ----------------------------------------------------------------------------------------------------------
# Loading and building


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled library, or None (logged once) when there is none for this source."""
    path = _PACKAGE / "_boxes.so"
    if not path.exists():
        log.warning(
            "native box copy not built: the slower plain-torch copy is used. "
            "Install a C++ compiler and run `python -m hybridengine.native build`."
        )
        return None
    library = ctypes.CDLL(str(path))
    sizes = {"he_box_bytes": BOX_DTYPE.itemsize, "he_lane_bytes": ctypes.sizeof(LaneRow)}
    known = all(hasattr(library, name) and getattr(library, name)() == size for name, size in sizes.items())
    if not known or not same_weights(library, "he_weight"):
        raise RuntimeError(f"{path} was built from other sources: run `python -m hybridengine.native build`")
    library.he_run_boxes.restype = ctypes.c_int64
    library.he_run_boxes.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int32] * 2]
    library.he_run_lanes.restype = ctypes.c_int64
    library.he_run_lanes.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    ]  # fmt: skip
    library.he_load.restype = ctypes.c_int64
    library.he_load.argtypes = [ctypes.c_void_p]
    library.he_store.restype = None
    library.he_store.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


def same_weights(library: ctypes.CDLL, function: str) -> bool:
    """Whether a library weighs words as this file does; sums of another one would look like wrong weights."""
    if not hasattr(library, function):
        return False
    theirs = getattr(library, function)
    theirs.restype, theirs.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
    indices = np.array([0, 1, RUN - 1, RUN, 123_456_789_012], np.uint64)
    return [theirs(int(i)) for i in indices] == weights(indices).tolist()


def build() -> Path:
    """Compile the library next to this file. Raises as native_build.compile_cpu does."""
    return compile_cpu(source_dir(), _PACKAGE / "_boxes.so")


# ----------------------------------------------------------------------------------------------------------
# The plain-torch twin


def _run_torch(boxes: np.ndarray, sums: np.ndarray | None) -> None:
    for box in boxes:
        op = int(box["op"])
        source = _view(int(box["src"]), box["sizes"], box["src_strides"], _WORDS[2 if op == F32_TO_BF16 else op])
        if op == F32_TO_BF16:
            nan = source.view(torch.float32).isnan()  # torch's NaN has other bits, and on some devices others again
            source = source.view(torch.float32).to(torch.bfloat16).view(torch.int16).masked_fill(nan, 0x7FC0)
        if box["dst"]:
            _view(int(box["dst"]), box["sizes"], box["dst_strides"], source.dtype).copy_(source)
        if box["tee"]:
            dense = np.array(contiguous_strides(box["sizes"].tolist()))
            _view(int(box["tee"]), box["sizes"], dense, source.dtype).copy_(source)
        slots = [int(slot) for slot in box["slot"] if slot >= 0]
        if slots and sums is not None:
            total = _fingerprint(source, box) & (2**64 - 1)
            for slot in slots:
                sums[slot] = np.uint64((int(sums[slot]) + total) & (2**64 - 1))


def weights(indices: np.ndarray) -> np.ndarray:
    """Weights of a parameter's 32-bit words in its fingerprint, mod 2**64; see csrc/weights.h.

    A 64-bit mix of the run of 1024 words (SplitMix64) times a 32-bit mix of the place in it (MurmurHash3's finaliser).

    Args:
        indices: which words; uint64, of any shape.
    """
    runs, places = indices >> np.uint64(10), (indices & np.uint64(RUN - 1)).astype(np.uint32) + np.uint32(1)
    runs = runs + np.uint64(0x9E3779B97F4A7C15)
    runs = (runs ^ (runs >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    runs = (runs ^ (runs >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    places = (places ^ (places >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    places = (places ^ (places >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    odd_runs = (runs ^ (runs >> np.uint64(31))) | np.uint64(1)
    odd_places = (places ^ (places >> np.uint32(16))) | np.uint32(1)
    return odd_runs * odd_places.astype(np.uint64)


def _fingerprint(words: torch.Tensor, box: np.void) -> int:
    indices = np.full((1,) * MAX_DIMS, int(box["index"]))
    for dim, (size, step) in enumerate(zip(box["sizes"], box["index_strides"], strict=True)):
        shape = [1] * MAX_DIMS
        shape[dim] = int(size)
        indices = indices + (np.arange(int(size)) * int(step)).reshape(shape)
    width = words.element_size()
    bits = (words.to(torch.int64) & _MASKS[width.bit_length() - 1]).numpy().view(np.uint64)
    index, half = indices.astype(np.uint64), np.uint64(32)
    if width == 8:
        low, high = bits & np.uint64(0xFFFF_FFFF), bits >> half
        terms = low * weights(2 * index) + high * weights(2 * index + np.uint64(1))
    else:
        per = np.uint64(4 // width)
        terms = (bits << (np.uint64(8 * width) * (index % per))) * weights(index // per)
    return int(terms.sum(dtype=np.uint64))


def _view(address: int, sizes: np.ndarray, strides: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Memory at an address as a tensor; the caller keeps the memory alive."""
    extent = 1 + int(((sizes - 1) * strides).sum())
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided([int(n) for n in sizes], [int(s) for s in strides])


def check_boxes(boxes: np.ndarray, sums: np.ndarray | None) -> None:
    """Raise ValueError, as :func:`run_boxes` does, for a table or sums that the library could not work on."""
    if boxes.dtype != BOX_DTYPE or not boxes.flags.c_contiguous:
        raise ValueError(f"a box table is a contiguous array of native.BOX_DTYPE, not {boxes.dtype}")
    if sums is not None and (sums.dtype != np.uint64 or not sums.flags.c_contiguous):
        raise ValueError(f"sums is a contiguous uint64 array, not {sums.dtype}")
    highest = int(boxes["slot"].max(initial=-1))
    if highest >= (0 if sums is None else len(sums)):
        raise ValueError(f"a box adds to sum {highest}, but there are {0 if sums is None else len(sums)}")
    if len(boxes) and not 0 <= int(boxes["op"].min()) <= int(boxes["op"].max()) <= F32_TO_BF16:
        raise ValueError(f"unknown op in {sorted(set(boxes['op'].tolist()))}")
    if (boxes["tee"] * ((boxes["op"] != F32_TO_BF16) | (boxes["dst"] == 0))).any():
        raise ValueError("only a cast that writes can write a second, dense copy")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.native",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action",
        choices=("build", "build-cuda", "status"),
        help="compile the box copy; compile the one for this machine's GPU; print which are built",
    )
    parser.add_argument(
        "--arch",
        default="native",
        help="of build-cuda: nvcc's -arch, such as sm_90 or all-major; default: that of the GPU that is here",
    )
    given = parser.parse_args(arguments)
    from hybridengine import native_cuda  # which is built on this module

    if given.action == "build":
        print(f"built {build()}")
    elif given.action == "build-cuda":
        print(f"built {native_cuda.build(given.arch)}")
    else:
        for what, (state, remedy) in (("csrc build", status()), ("CUDA box copy", native_cuda.status())):
            print(f"{what}: {state}{f'; {remedy}' if remedy else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
