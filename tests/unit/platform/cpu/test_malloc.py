"""What a step frees stays with the process, within bounds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from hybridengine.platform.cpu import malloc

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

PROGRAM = """
import ctypes, resource, sys
import torch
from hybridengine.platform.cpu.malloc import keep_freed_memory

for option in (-1, -3):  # the values glibc starts with, without its rule that may or may not raise them
    assert ctypes.CDLL(None).mallopt(option, 128 << 10)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def step():
    activations = [torch.ones(600_000) for _ in range(12)]  # 29 MB in blocks of 2.4 MB

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
large = [torch.ones(20_000_000) for _ in range(3)]  # 80 MB each
before = int(open("/proc/self/statm").read().split()[1])
del large
print((before - int(open("/proc/self/statm").read().split()[1])) * 4096 / 240e6)
"""


def run(mode: str) -> tuple[float, float]:
    """(Page faults of a step, share of large freed blocks that went back) of a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    faults, returned = map(float, done.stdout.split())
    return faults, returned


def test_steps_take_no_new_pages_and_large_blocks_go_back() -> None:
    plain, kept = run("plain"), run("keep")
    assert plain[0] > 1000 > 100 > kept[0]
    assert kept[1] > 0.95


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MALLOC_TRIM_THRESHOLD_", "131072")
    assert not malloc.keep_freed_memory()


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not malloc.keep_freed_memory()
