"""The CUDA box copy without a GPU: its host part as nvcc builds it, its kernel on emulated threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridengine import native, native_build
from tests.unit.test_native import box_of

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
TILE = 16 * 1024


@needs_nvcc
def test_cuda_library_compiles(tmp_path: Path) -> None:
    output = native_build.compile_cuda(native_build.source_dir(), tmp_path / "boxes.so", arch="sm_90")
    library = ctypes.CDLL(str(output))  # the runtime is linked in; loading needs no GPU
    assert library.he_cuda_box_bytes() == native.BOX_DTYPE.itemsize
    assert library.he_cuda_run_boxes and library.he_cuda_prepare


def compile_emulated(output: Path) -> Path:
    """csrc/boxes.cu for threads of the host in place of a GPU's."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    stub = Path(__file__).parent / "cuda_emulation"
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-pthread", f"-I{stub}", "-x", "c++"]
    subprocess.run([*command, str(native_build.source_dir() / "boxes.cu"), "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_emulated(tmp_path_factory.mktemp("cuda") / "emulated.so")))
    library.he_cuda_prepare.restype = ctypes.c_int64
    return library


def prepare(library: ctypes.CDLL, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    prepared, starts = np.zeros_like(boxes), np.zeros(len(boxes) + 1, np.int64)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (boxes, prepared, starts)]
    assert library.he_cuda_prepare(pointers[0], ctypes.c_int64(len(boxes)), pointers[1], pointers[2]) == 0
    return prepared, starts


def run(library: ctypes.CDLL, boxes: np.ndarray, sums: np.ndarray) -> None:
    prepared, starts = prepare(library, boxes)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (prepared, starts, sums)]
    counts = ctypes.c_int64(len(boxes)), ctypes.c_int64(int(starts[-1]))
    assert library.he_cuda_run_boxes(pointers[0], pointers[1], *counts, pointers[2], None) == 0


CASES = {
    "contiguous": (lambda: torch.randn(3, 1024), lambda s, t: torch.zeros(s.shape, dtype=t)),
    "rows": (lambda: torch.randn(9, 96)[2:8, 16:80], lambda s, t: torch.zeros(20, 128, dtype=t)[:6, 32:96]),
    "misaligned": (lambda: torch.randn(9, 97)[2:8, 3:80], lambda s, t: torch.zeros(20, 128, dtype=t)[:6, 1:78]),
    "transposed": (lambda: torch.randn(40, 24), lambda s, t: torch.zeros(24, 40, dtype=t).t()),
    "four-dims": (
        lambda: torch.randn(3, 5, 7, 16)[1:, 1:, 1:, :8],
        lambda s, t: torch.zeros(2, 6, 4, 8, dtype=t).permute(0, 2, 1, 3),
    ),
    "one": (lambda: torch.randn(1), lambda s, t: torch.zeros(1, dtype=t)),
    "many-tiles": (lambda: torch.randn(2, TILE + 100), lambda s, t: torch.zeros(s.shape, dtype=t)),
}
KINDS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "cast": (torch.float32, torch.bfloat16),
    "float64": (torch.float64, torch.float64),
    "uint8": (torch.uint8, torch.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_agrees_with_the_cpu_copy(emulated: ctypes.CDLL, kind: str) -> None:
    """All shapes in one launch, fingerprints in separate slots, one box read only."""
    torch.manual_seed(0)
    source, target = KINDS[kind]
    tables, tensors = [], []
    for slot, (make_src, make_dst) in enumerate(CASES.values()):
        src = (make_src() * 50).to(source) if source == torch.uint8 else make_src().to(source).mul_(50)
        dst = make_dst(src, target)
        steps = tuple(range(7, 7 + src.dim()))
        tables.append(box_of(src, dst, index=1000 * slot, index_strides=steps, slot=slot))
        tensors.append((src, dst))
    read_only = tables[1].copy()
    read_only["dst"], read_only["slot"][0] = 0, (len(CASES), 0)
    boxes = np.concatenate([*tables, read_only, native.new_boxes(1)])
    ours, reference = np.zeros(len(CASES) + 1, np.uint64), np.zeros(len(CASES) + 1, np.uint64)
    run(emulated, boxes, ours)
    copies = [dst.clone() for _, dst in tensors]
    native._run_torch(boxes[:-1], reference)
    for name, copy, (_, dst) in zip(CASES, copies, tensors, strict=True):
        assert torch.equal(copy, dst), name
    assert ours.tolist() == reference.tolist()


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "misaligned"])
def test_kernel_writes_a_second_dense_copy(emulated: ctypes.CDLL, shift: int) -> None:
    tables, tensors = [], []
    for make_src, make_dst in CASES.values():
        src = make_src()
        dst = make_dst(src, torch.bfloat16)
        tee = torch.zeros(src.numel() + shift, dtype=torch.bfloat16)[shift:].view(src.shape)
        tables.append(box_of(src, dst))
        tables[-1]["tee"] = tee.data_ptr()
        tensors.append((src, dst, tee))
    run(emulated, np.concatenate(tables), np.zeros(1, np.uint64))
    for name, (src, dst, tee) in zip(CASES, tensors, strict=True):
        assert torch.equal(dst, src.bfloat16()) and torch.equal(tee, dst), name


def test_wide_accesses_only_where_they_are_aligned(emulated: ctypes.CDLL) -> None:
    src, dst = torch.zeros(64, 64), torch.zeros(64, 64)
    cases = [
        (src, dst, 4),
        (src[:, 4:60], dst[:, :56], 4),
        (src[:, 1:61], dst[:, :60], 1),  # source address off by 4 bytes
        (src[:, :62], dst[:, :62], 1),  # rows that are no multiple of 4
        (src, dst.t(), 1),
        (src, torch.zeros(64, 64, dtype=torch.bfloat16), 8),
    ]
    boxes = np.concatenate([box_of(a, b) for a, b, _ in cases])
    tee = np.concatenate([boxes[-1:], boxes[-1:]])
    tee["tee"] = [dst.data_ptr(), dst.data_ptr() + 2]  # the second copy's address off by 2 bytes
    boxes = np.concatenate([boxes, tee])
    cases += [(src, dst, 8), (src, dst, 1)]
    prepared, starts = prepare(emulated, boxes)
    assert prepared["reserved"].tolist() == [per for *_, per in cases]
    assert np.diff(starts).tolist() == [1] * len(cases)
