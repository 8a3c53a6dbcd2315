"""The native box copy against its plain-torch twin, element by element and bit by bit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine import native, native_build

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs the compiled box copy (a C++ compiler)")
MASK = 2**64 - 1


def box_of(
    src: torch.Tensor, dst: torch.Tensor | None, *, index: int = 0, index_strides=None, slot: int = 0
) -> np.ndarray:
    boxes = native.new_boxes(1)
    row = boxes[0]
    row["src"], row["dst"] = src.data_ptr(), 0 if dst is None else dst.data_ptr()
    row["op"] = native.copy_op(src.dtype, src.dtype if dst is None else dst.dtype)
    row["slot"][0], row["index"] = slot, index
    steps = index_strides or torch.empty(src.shape, device="meta").stride()
    native.set_dims(row, src.shape, src.stride(), src.stride() if dst is None else dst.stride(), steps)
    return boxes


def weight(g: int) -> int:
    """Written anew from the definition: SplitMix64 of g // 1024, times MurmurHash3's finaliser of g % 1024 + 1, odd."""
    z = ((g >> 10) + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    p = g % 1024 + 1
    p = (p ^ p >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    p = (p ^ p >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return ((z ^ z >> 31) | 1) * ((p ^ p >> 16) | 1) & MASK


def by_definition(elements: torch.Tensor, index: np.ndarray) -> int:
    """sum word * weight mod 2^64 over the parameter's 32-bit words, in Python integers, from one byte to the next."""
    width = elements.element_size()
    found, raw = 0, elements.contiguous().view(torch.uint8).flatten().tolist()
    for place, byte in enumerate(raw):
        at = int(index.ravel()[place // width]) * width + place % width  # of the parameter's bytes
        found += (byte << 8 * (at % 4)) * weight(at // 4)
    return found & MASK


def test_weights_are_the_same_in_the_library() -> None:
    """SplitMix64's first output from state 0 is 0xE220A8397B1DCDAF, the finaliser of 1 is 0x514E28B7 (published)."""
    indices = [0, 1, 1023, 1024, 2**31, 2**40 + 17]
    assert weight(0) == 0xE220A8397B1DCDAF * 0x514E28B7 & MASK
    library = native.load()
    assert [weight(i) for i in indices] == [library.he_weight(i) for i in indices]
    assert native.weights(np.array(indices, np.uint64)).tolist() == [weight(i) for i in indices]


def test_weights_are_odd_and_those_of_a_run_differ() -> None:
    found = native.weights(np.arange(8 * native.RUN, dtype=np.uint64))
    assert (found & np.uint64(1)).all() and len(set(found.tolist())) == 8 * native.RUN


@pytest.mark.parametrize("of", ["he_weight", "he_box_bytes"])
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """One that weighs words in another way would make every sync look wrong."""
    source = tmp_path / "old.cpp"
    sizes = {"he_box_bytes": native.BOX_DTYPE.itemsize, "he_lane_bytes": ctypes.sizeof(native.LaneRow)}
    lines = [f'extern "C" long {name}() {{ return {size + (name == of)}; }}' for name, size in sizes.items()]
    if of == "he_weight":
        lines.append('extern "C" unsigned long he_weight(unsigned long i) { return 2 * i + 1; }')
    source.write_text("\n".join(lines))
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "_boxes.so")], check=True)
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    native.load.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="built from other sources: run"):
            native.load()
    finally:
        native.load.cache_clear()


def test_table_row_is_the_c_struct() -> None:
    assert native.load().he_box_bytes() == native.BOX_DTYPE.itemsize
    header = (native_build.source_dir() / "boxes.h").read_text()
    assert all(f"HE_STORES_{stores.name} = {stores.value}" in header for stores in native.Stores)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 31, 64, 1000, 70_001])
def test_fingerprint_is_the_definition(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    src = (torch.randn(count) * 100).to(dtype)
    dst, sums = torch.zeros_like(src), np.zeros(1, np.uint64)
    native.run_boxes(box_of(src, dst, index=5), sums)
    assert torch.equal(dst, src)
    assert int(sums[0]) == by_definition(src, np.arange(count) + 5)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 1000, 1023, 5 * 1024 - 20, 2**40 + 7])
@pytest.mark.parametrize("count", [3, 40, 1024, 2500])
@pytest.mark.parametrize(("source", "target"), [("bfloat16",) * 2, ("float32",) * 2, ("float32", "bfloat16")])
def test_sums_over_the_ends_of_runs(start: int, count: int, source: str, target: str) -> None:
    """Runs of weights begin anywhere in a row, in the middle of a vector, too."""
    src = torch.randn(2, count, generator=torch.Generator().manual_seed(count)).to(getattr(torch, source))
    dst, sums = torch.zeros(2, count, dtype=getattr(torch, target)), np.zeros(1, np.uint64)
    native.run_boxes(box_of(src, dst, index=start, index_strides=(3000, 1)), sums)
    index = start + np.concatenate([np.arange(count), 3000 + np.arange(count)])
    assert torch.equal(dst, src.to(dst.dtype)) and int(sums[0]) == by_definition(dst, index)


@pytest.mark.parametrize("count", [1, 9, 4096, 100_003])
@pytest.mark.parametrize("write", [True, False], ids=["write", "read-only"])
def test_cast_rounds_as_torch_does(count: int, write: bool) -> None:
    """Bit patterns from the whole range, subnormals, infinities and ties included; NaN stays NaN."""
    generator = np.random.default_rng(count)
    bits = generator.integers(0, 2**32, count, dtype=np.uint32)
    bits[: min(count, 6)] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001][: min(count, 6)]
    src = torch.from_numpy(bits.view(np.float32))
    dst = torch.zeros(count, dtype=torch.bfloat16)
    boxes, sums = box_of(src, dst), np.zeros(1, np.uint64)
    if not write:
        boxes["dst"] = 0
    native.run_boxes(boxes, sums)
    expected = src.to(torch.bfloat16)
    expected[src.isnan()] = torch.tensor(0x7FC0, dtype=torch.int16).view(torch.bfloat16)
    if write:
        assert torch.equal(dst.view(torch.int16), expected.view(torch.int16))
    assert int(sums[0]) == by_definition(expected, np.arange(count))
    twins = np.zeros(1, np.uint64)
    native._run_torch(boxes, twins)
    assert sums == twins


def twin_case(dims: list[tuple[int, int, int]], dtype: torch.dtype, target: torch.dtype, transpose: bool, seed: int):
    """A random box inside larger random tensors: (source view, destination view, index start, index strides)."""
    generator = torch.Generator().manual_seed(seed)
    outer = [before + size + after for before, size, after in dims]
    src = torch.randn(outer, generator=generator).to(dtype)
    dst = torch.zeros(outer[::-1] if transpose else outer, dtype=target)
    dst = dst.permute(*reversed(range(len(outer)))) if transpose else dst
    for dim, (before, size, _) in enumerate(dims):
        src, dst = src.narrow(dim, before, size), dst.narrow(dim, before, size)
    steps = torch.empty(outer, device="meta").stride()
    return src, dst, sum(before * step for (before, _, _), step in zip(dims, steps, strict=True)), steps


@settings(max_examples=150, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=4),
    kinds=st.sampled_from(
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
    ),
    transpose=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_twin_agrees_on_random_boxes(dims, kinds, transpose, seed) -> None:
    dims = [(a, min(n, 12) if len(dims) > 2 else n, b) for a, n, b in dims]
    src, dst, index, steps = twin_case(dims, *kinds, transpose, seed)
    ours, twins = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    boxes = box_of(src, dst, index=index, index_strides=steps)
    native.run_boxes(boxes, ours, threads=1)
    first = dst.clone()
    assert torch.equal(first, src.to(dst.dtype))
    dst.zero_()
    native._run_torch(boxes, twins)
    assert torch.equal(dst, first)
    assert ours == twins


def test_only_the_box_is_written() -> None:
    src, dst = torch.arange(64.0).view(8, 8), torch.full((10, 10), -1.0)
    native.run_boxes(box_of(src[2:5, 1:4], dst[3:6, 2:5]), np.zeros(1, np.uint64))
    expected = torch.full((10, 10), -1.0)
    expected[3:6, 2:5] = src[2:5, 1:4]
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("shift", [0, 1, 3, 8])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=["copy", "cast"])
def test_large_batches_with_streaming_stores_at_any_alignment(shift: int, target: torch.dtype) -> None:
    """Above 8 MiB stores bypass the caches, which needs 16-byte alignment; rows of 1000 elements do not have it."""
    src = torch.randn(5000, 1001)[:, :1000]
    memory = torch.zeros(5000 * 1003 + shift, dtype=target)
    dst = memory[shift:].view(5000, 1003)[:, 1:1001]
    sums = np.zeros(2, np.uint64)
    native.run_boxes(box_of(src, dst), sums, threads=3)
    assert torch.equal(dst, src.to(target))
    native.run_boxes(box_of(dst, None, slot=1, index_strides=(1000, 1)), sums)
    assert sums[0] == sums[1]
    assert memory[:shift].eq(0).all() and dst.as_strided((5000,), (1003,), shift + 1001).eq(0).all()


@pytest.mark.parametrize("stores", native.Stores, ids=lambda stores: stores.name.lower())
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=["copy", "cast"])
def test_where_stores_go_changes_nothing(stores: native.Stores, shift: int, target: torch.dtype) -> None:
    src = torch.randn(50, 130)
    memory = torch.zeros(50 * 140 + shift, dtype=target)
    dst = memory[shift:].view(50, 140)[:, :130]
    ours, twins = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    native.run_boxes(box_of(src, dst), ours, stores=stores)
    native._run_torch(box_of(dst, None, index_strides=(130, 1)), twins)
    assert torch.equal(dst, src.to(target)) and ours == twins
    assert int(memory.count_nonzero()) == int(dst.count_nonzero())


@settings(max_examples=150, deadline=None)
@given(
    dims=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=4),
    transpose=st.booleans(),
    shift=st.sampled_from([0, 1, 32]),
    stores=st.sampled_from(native.Stores),
    seed=st.integers(0, 2**16),
)
def test_a_cast_writes_a_second_dense_copy(dims, transpose, shift, stores, seed) -> None:
    """Row-major whatever the first destination's order, aligned or not, and the twin does the same."""
    dims = [(a, min(n, 12) if len(dims) > 2 else n, b) for a, n, b in dims]
    src, dst, index, steps = twin_case(dims, torch.float32, torch.bfloat16, transpose, seed)
    memory = torch.full((src.numel() + 128,), -1.0, dtype=torch.bfloat16)
    begin = -memory.data_ptr() % 64 // 2 + shift
    tee = memory[begin : begin + src.numel()].view(src.shape)
    boxes = box_of(src, dst, index=index, index_strides=steps)
    plain, with_tee, twins = np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    native.run_boxes(boxes, plain, threads=1)
    boxes["tee"] = tee.data_ptr()
    dst.zero_()
    native.run_boxes(boxes, with_tee, threads=1, stores=stores)
    assert torch.equal(dst, src.bfloat16()) and torch.equal(tee, dst) and plain == with_tee
    assert memory[:begin].eq(-1).all() and memory[begin + src.numel() :].eq(-1).all()
    tee.zero_()
    native._run_torch(boxes, twins)
    assert torch.equal(tee, dst) and twins == plain


def test_long_rows_with_a_second_copy_at_any_alignment() -> None:
    """Cut along the row for threads; the first destination's alignment decides where rows are cut for wide stores."""
    src = torch.randn(2, 200_000)
    for shift, other in ((0, 0), (3, 3), (5, 0)):
        dst, tee = (torch.zeros(400_000 + n, dtype=torch.bfloat16)[n:].view(2, -1) for n in (shift, other))
        boxes, sums = box_of(src, dst), np.zeros(1, np.uint64)
        boxes["tee"] = tee.data_ptr()
        native.run_boxes(boxes, sums, threads=3, stores=native.Stores.STREAMED)
        assert torch.equal(dst, src.bfloat16()) and torch.equal(tee, dst)
        assert int(sums[0]) == by_definition(dst, np.arange(src.numel()))


def test_many_boxes_many_threads_add_up() -> None:
    src = torch.arange(300_000, dtype=torch.float32)
    dst, sums = torch.zeros_like(src), np.zeros(2, np.uint64)
    cuts = [0, 1, 10, 65_000, 65_001, 200_000, 300_000]
    parts = [box_of(src[a:b], dst[a:b], index=a, slot=int(a >= 65_000)) for a, b in zip(cuts, cuts[1:], strict=False)]
    native.run_boxes(np.concatenate(parts), sums, threads=4)
    whole = np.zeros(1, np.uint64)
    native.run_boxes(box_of(src, None), whole)
    assert torch.equal(src, dst) and int(sums.sum(dtype=np.uint64)) == int(whole[0])


def test_user_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="float16"):
        native.copy_op(torch.float32, torch.float16)
    with pytest.raises(ValueError, match="5 dimensions"):
        native.set_dims(native.new_boxes(1)[0], (2,) * 5, (1,) * 5, (1,) * 5, (1,) * 5)
    src = torch.zeros(4)
    with pytest.raises(ValueError, match="adds to sum 3"):
        native.run_boxes(box_of(src, src.clone(), slot=3), np.zeros(2, np.uint64))
    boxes = box_of(src, src.clone())
    boxes["tee"] = src.data_ptr()
    with pytest.raises(ValueError, match="only a cast"):
        native.run_boxes(boxes, np.zeros(1, np.uint64))
    boxes["op"], boxes["tee"] = 9, 0
    with pytest.raises(ValueError, match="unknown op"):
        native.run_boxes(boxes, np.zeros(1, np.uint64))


def test_a_missing_library_is_announced_once(monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    native.load.cache_clear()
    try:
        src, dst = torch.arange(6.0), torch.zeros(6)
        for _ in range(2):
            native.run_boxes(box_of(src, dst), np.zeros(1, np.uint64))
        assert torch.equal(src, dst) and native.implementation() == "torch"
        assert len([r for r in caplog.records if "not built" in r.message]) == 1
    finally:
        native.load.cache_clear()


def test_the_library_is_built_from_the_present_sources(tmp_path: Path) -> None:
    """A fresh build has the same interface; this also is the test that csrc compiles without warnings."""
    sources = native_build.source_dir()
    output = native_build.compile_cpu(sources, tmp_path / "boxes.so")
    assert ctypes.CDLL(str(output)).he_box_bytes() == native.BOX_DTYPE.itemsize
    assert list(tmp_path.iterdir()) == [output]


def test_an_empty_table_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: pytest.fail("nothing has to be loaded"))
    sums = np.ones(1, np.uint64)
    native.run_boxes(native.new_boxes(0), sums)
    native.run_boxes(native.new_boxes(0))
    assert sums.tolist() == [1]


def run_program(program: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | (environment or {}),
        cwd=Path(__file__).parents[2], timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_threads_that_can_not_be_started_are_done_without(tmp_path: Path) -> None:
    """As under a full pids.max: the C++ exception must not end the process."""
    source = tmp_path / "refuse.c"
    source.write_text(
        "#include <errno.h>\n#include <stdlib.h>\n"
        "int pthread_create(void *a, const void *b, void *(*c)(void *), void *d) { return EAGAIN; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "refuse.so")], check=True)
    program = """
import numpy as np, torch
from hybridengine import native
from tests.unit.test_native import box_of
src, dst = torch.arange(300_000.0), torch.zeros(300_000)
native.run_boxes(box_of(src, dst), np.zeros(1, np.uint64), threads=4)
print(torch.equal(src, dst))
"""
    assert run_program(program, {"LD_PRELOAD": str(tmp_path / "refuse.so"), "OMP_NUM_THREADS": "1"}) == "True"


def test_no_memory_for_the_work_list_is_an_error_and_no_abort() -> None:
    """A box of 2**42 elements has a list of 2.7 GB, more than the address space that is left."""
    program = """
import resource
import numpy as np, torch
from hybridengine import native
from tests.unit.test_native import box_of
boxes = box_of(torch.zeros(8), None)
boxes["sizes"][0, -1] = 2**42
native.load()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    native.run_boxes(boxes, np.zeros(1, np.uint64), threads=1)
except MemoryError as error:
    print(error)
"""
    assert run_program(program) == "no memory for the work list of 1 boxes"
