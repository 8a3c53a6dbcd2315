"""What of a KV cache is usable: the arithmetic, and the free memory that it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.distributed.world import World
from hybridengine.memory import kv_plan
from hybridengine.memory.host import available_host_memory
from hybridengine.memory.kv_plan import RESERVE, affordable, describe, plan

MIB = 2**20


class Cache:
    """1,000 blocks of 1 MiB, of which a sequence needs 49 beside the engine's own."""

    total, minimum, block_bytes = 1000, 50, MIB

    def __init__(self) -> None:
        self.usable, self.planned = self.total, False

    def allow(self, count: int) -> None:
        self.usable, self.planned = count, True


#: (free bytes, ranks of this machine, blocks): what is free is shared out, and each rank keeps RESERVE of its share.
SHARES = {
    "plenty": (100_000 * MIB, 4, 1000),
    "exactly-all": (RESERVE + 1000 * MIB, 1, 1000),
    "one-block-less": (RESERVE + 1000 * MIB - 1, 1, 999),
    "shared": (4 * (RESERVE + 60 * MIB), 4, 60),
    "shared-one-byte-short": (4 * (RESERVE + 60 * MIB) - 1, 4, 59),
    "only-the-reserve": (2 * RESERVE, 2, 0),
    "less-than-the-reserve": (RESERVE, 2, 0),
    "nothing": (0, 1, 0),
}


@pytest.mark.parametrize(("free", "ranks", "blocks"), SHARES.values(), ids=SHARES.keys())
def test_what_is_free_is_shared_and_never_more_than_there_is(free: int, ranks: int, blocks: int) -> None:
    assert affordable(free, ranks=ranks, block_bytes=MIB, total=1000) == blocks


def test_blocks_go_and_come_back_and_less_than_a_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = RESERVE + 70 * MIB
    monkeypatch.setattr(kv_plan, "available_host_memory", lambda: free)
    cache, world = Cache(), World()
    plan(cache, world)
    assert cache.usable == 70 and describe(cache).startswith("0.07 of 0.98 GiB of KV cache per rank")
    free = RESERVE + 90 * MIB
    plan(cache, world)
    assert cache.usable == 70, "the plan holds until the cache has slept: what it uses meanwhile is not free"
    cache.planned, free = False, RESERVE + 50 * MIB - 1
    with pytest.raises(torch.OutOfMemoryError, match="takes 50 MiB.* has 49; here 0.55 GiB.* 1 rank") as refused:
        plan(cache, world)
    for key in ("rollout.max_model_len", "memory.offload_dir"):
        assert key in str(refused.value)
    assert cache.usable == 70 and not cache.planned
    free = RESERVE + 50 * MIB
    plan(cache, world)
    assert cache.usable == 50
    cache.planned, free = False, 100_000 * MIB
    plan(cache, world)
    assert cache.usable == 1000


def machine(root: Path, cgroup: str, files: dict[str, str]) -> int:
    """What is found free on a machine with 8,000 MiB available and these control groups (file -> contents)."""
    kernel = {"meminfo": f"MemFree: 1 kB\nMemAvailable: {8000 * 1024} kB\n", "self/cgroup": cgroup}
    for where, texts in (("proc", kernel), ("groups", files)):
        for name, text in texts.items():
            (root / where / name).parent.mkdir(parents=True, exist_ok=True)
            (root / where / name).write_text(text)
    return available_host_memory(root / "proc", root / "groups") // MIB


def group(path: str, limit: int | str, used: int, inactive: int, active: int) -> dict[str, str]:
    """A control group of version 2; MiB."""
    counters = f"anon 7\ninactive_file {inactive * MIB}\nactive_file {active * MIB}\n"
    limit = limit if isinstance(limit, str) else str(limit * MIB)
    return {f"{path}memory.max": limit, f"{path}memory.current": str(used * MIB), f"{path}memory.stat": counters}


def group_v1(path: str, limit: int, used: int, inactive: int, active: int) -> dict[str, str]:
    """A control group of version 1, whose plain counters leave out what is inside of it; MiB."""
    counters = f"inactive_file 1\ntotal_inactive_file {inactive * MIB}\ntotal_active_file {active * MIB}\n"
    return {
        f"{path}memory.limit_in_bytes": str(limit * MIB),
        f"{path}memory.usage_in_bytes": str(used * MIB),
        f"{path}memory.stat": counters,
    }


UNLIMITED = 9223372036854771712 // MIB
#: (/proc/self/cgroup, files, MiB): the smallest of what the kernel has and of every group's limit less usage, with the
#: page cache added.
MACHINES = {
    "no-groups": ("0::/\n", {}, 8000),
    "v2-unlimited": ("0::/job\n", group("job/", "max", 5000, 0, 0), 8000),
    "v2-limited": ("0::/job\n", group("job/", 6000, 5000, 300, 200), 1500),
    "v2-outer-is-tighter": ("0::/a/job\n", group("a/job/", 6000, 1000, 0, 0) | group("a/", 7000, 6900, 0, 50), 150),
    "v2-inside-a-container": ("0::/\n", group("", 4000, 1000, 0, 0), 3000),
    "v2-path-of-the-host": ("0::/kubepods/pod7\n", group("", 4000, 1000, 0, 0), 3000),
    "v2-roomier-than-the-machine": ("0::/job\n", group("job/", 90000, 1000, 0, 0), 8000),
    "v2-over-its-limit": ("0::/job\n", group("job/", 4000, 4001, 0, 0), 0),
    "v1-unlimited": ("4:memory:/job\n", group_v1("memory/job/", UNLIMITED, 5000, 0, 0), 8000),
    "v1-limited": ("5:cpu:/x\n4:memory:/job\n0::/\n", group_v1("memory/job/", 6000, 5000, 300, 200), 1500),
}


@pytest.mark.parametrize(("cgroup", "files", "expected"), MACHINES.values(), ids=MACHINES.keys())
def test_free_memory_is_the_least_that_machine_and_groups_have(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert machine(tmp_path, cgroup, files) == expected


def test_this_machine_has_some_memory_free() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert MIB < available_host_memory() <= int(total.split()[1]) * 1024
