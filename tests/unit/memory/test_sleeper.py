"""Sleeping tensors really give memory to the operating system, and come back as zeros in place."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

from hybridengine.memory.sleeper import Sleeper

KIB, MIB = 2**10, 2**20


def pss_mib() -> float:
    """This process's resident memory, without files: of those its share depends on who else maps them."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss_Anon:"))


@pytest.mark.parametrize("size", [64 * KIB, 900 * KIB, 8 * MIB, 48 * MIB], ids=["64K", "900K", "8M", "48M"])
def test_memory_goes_to_the_operating_system(size: int) -> None:
    """Above and below the size from which the allocator maps every block by itself.

    The neighbours are what a program allocates in between and keeps.
    """
    torch.ones(30 * MIB // 4)  # freed at once: raises glibc's mmap threshold, as a program of some age has
    tensors, neighbours = [], []
    for _ in range(96 * MIB // size):
        tensors.append(torch.ones(size // 4))
        neighbours.append(torch.ones(64))
    sleeper = Sleeper(tensors)
    assert sleeper.nbytes == len(tensors) * size
    awake = pss_mib()
    sleeper.sleep()
    asleep = pss_mib()
    sleeper.wake()
    for tensor in tensors:
        tensor.fill_(1)
    share = 0.95 if size >= MIB else 0.8  # small ones share pages with their neighbours at both ends
    assert awake - asleep > share * sleeper.nbytes / MIB, f"{awake:.0f} MiB awake, {asleep:.0f} MiB asleep"
    assert pss_mib() < awake + 8
    assert len(neighbours) == len(tensors)


def test_woken_tensors_are_the_same_objects_and_zero() -> None:
    whole = torch.arange(10.0)
    view, small = whole[2:4], torch.full((3,), 7, dtype=torch.bfloat16)
    sleeper = Sleeper([whole, view, small, torch.empty(0)])
    assert sleeper.nbytes == 40 + 6
    sleeper.sleep()
    sleeper.sleep()
    sleeper.wake()
    assert whole.tolist() == [0.0] * 10 and small.tolist() == [0.0] * 3
    whole.copy_(torch.arange(10.0))
    sleeper.wake()  # awake already: nothing is cleared
    assert view.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("pages", [0, 1, 2, 40])
def test_neighbours_on_the_same_pages_keep_what_they_have(pages: int) -> None:
    """Storages that begin and end anywhere on a page."""
    block = torch.arange(64 * 4096, dtype=torch.int32).view(torch.uint8)
    for start in (0, 1, 100, 4095):
        size = pages * 4096 + 333
        before = block.clone()
        middle = torch.frombuffer(block.numpy()[start : start + size], dtype=torch.uint8)
        Sleeper([middle]).sleep()
        assert not bool(middle.any())
        assert torch.equal(block[:start], before[:start]) and torch.equal(block[start + size :], before[start + size :])
        block.copy_(before)


def test_freed_memory_of_others_is_left_alone() -> None:
    """What the program has freed and will take again is not trimmed away with it: no new page faults."""
    tensors = [torch.ones(16 * KIB) for _ in range(64)]

    def work() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(64 * KIB) for _ in range(64)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del blocks
        return faults

    torch.ones(30 * MIB // 4)  # as above: blocks of this size come from glibc's heap from now on
    for _ in range(3):
        work()
    Sleeper(tensors).sleep()
    assert work() < 500, "of 4096 pages"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gets_its_memory_back_and_gives_zeros() -> None:
    tensors = [torch.ones(n, device="cuda") for n in (100, 3 * MIB, 24 * MIB)]
    sleeper, (free, _) = Sleeper(tensors), torch.cuda.mem_get_info()
    sleeper.sleep()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 0.98 * sleeper.nbytes
    sleeper.wake()
    assert not any(bool(tensor.any()) for tensor in tensors)
