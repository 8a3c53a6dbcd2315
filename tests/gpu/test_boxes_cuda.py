"""The CUDA box copy on a real GPU, bit by bit against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridengine import native, native_cuda
from tests.unit.test_native import box_of
from tests.unit.test_native_cuda import CASES, KINDS

DEVICE = torch.device("cuda", 0)


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides and the same distance from an aligned address, on the GPU."""
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=DEVICE)
    storage.copy_(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
    view = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
    return view.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def totals(sums: torch.Tensor) -> list[int]:
    return sums.cpu().numpy().view(np.uint64).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_casts_and_sums_as_the_cpu_does(kind: str) -> None:
    torch.manual_seed(0)
    source, target = KINDS[kind]
    here, there, results = [], [], []
    for slot, (make_src, make_dst) in enumerate(CASES.values()):
        src = (make_src() * 50).to(source) if source == torch.uint8 else make_src().to(source).mul_(50)
        dst = make_dst(src, target)
        steps = tuple(range(7, 7 + src.dim()))
        ours, theirs = placed(src), placed(dst)
        here.append(box_of(src, dst, index=1000 * slot, index_strides=steps, slot=slot))
        there.append(box_of(ours, theirs, index=1000 * slot, index_strides=steps, slot=slot))
        results.append((src, dst, ours, theirs))
    reference, sums = np.zeros(len(CASES), np.uint64), torch.zeros(len(CASES), dtype=torch.int64, device=DEVICE)
    native.run_boxes(np.concatenate(here), reference)
    native_cuda.run_boxes(np.concatenate(there), sums, DEVICE)
    for name, (_, dst, _, theirs) in zip(CASES, results, strict=True):
        assert (
            torch.equal(theirs.cpu().view(torch.uint8), dst.contiguous().view(torch.uint8))
            if dst.is_contiguous()
            else (torch.equal(theirs.cpu(), dst))
        ), name
    assert totals(sums) == reference.tolist()


def test_cast_rounds_as_torch_does_on_all_bit_patterns() -> None:
    bits = torch.arange(-(2**31), 2**31, 251, dtype=torch.int64).to(torch.int32).to(DEVICE)
    src = bits.view(torch.float32)
    dst = torch.zeros(src.shape, dtype=torch.bfloat16, device=DEVICE)
    native_cuda.run_boxes(box_of(src, dst), torch.zeros(1, dtype=torch.int64, device=DEVICE), DEVICE)
    expected = src.to(torch.bfloat16)
    nan = src.isnan()
    assert torch.equal(dst[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert bool(dst[nan].isnan().all())


def test_runs_in_the_order_of_the_current_stream() -> None:
    """A producer still at work on the same stream is waited for; the table may be reused at once."""
    stream = torch.cuda.Stream()
    src, dst = torch.zeros(1 << 22, device=DEVICE), torch.zeros(1 << 22, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        src.fill_(3.0)
        boxes = box_of(src, dst)
        boxes["slot"] = -1
        native_cuda.run_boxes(boxes, None, DEVICE)
        boxes[:] = 0
    stream.synchronize()
    assert bool((dst == 3.0).all())


def test_more_elements_than_32_bits_can_index() -> None:
    count = 2**31 + 4096
    src = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    src.random_(0, 256)
    dst = torch.zeros_like(src)
    sums = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    native_cuda.run_boxes(box_of(src, dst), sums, DEVICE)
    assert torch.equal(src, dst)
    halves = [src[: count // 2], src[count // 2 :]]
    boxes = np.concatenate([box_of(halves[0], None, slot=1), box_of(halves[1], None, index=count // 2, slot=1)])
    native_cuda.run_boxes(boxes, sums, DEVICE)
    assert totals(sums)[0] == totals(sums)[1]


def test_refusals() -> None:
    boxes = box_of(torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE))
    boxes["op"] = 99
    with pytest.raises(ValueError, match="unknown op"):
        native_cuda.run_boxes(boxes, None, DEVICE)
