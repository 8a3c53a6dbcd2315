"""FlatOffload: bits survive any order of calls and failures, views stay valid, memory really goes."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridengine import platform
from hybridengine.config import TrainConfig
from hybridengine.engines.train.fsdp.movers import _moments
from hybridengine.engines.train.optim import ShardedAdamW
from hybridengine.memory.tracker import host_memory
from hybridengine.platform.cpu import pages
from hybridengine.platform.cpu.mapped import MappedOffload
from hybridengine.platform.offload import FlatOffload
from hybridengine.platform.stores import FileStore, in_memory

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")]),
]


def make(device: str) -> dict[str, torch.Tensor]:
    """Views of one storage, odd sizes, a non-contiguous one, an empty one, several dtypes."""
    base = torch.randn(10_000, device=device)
    return {
        "base": base,
        "view": base[17:517].view(100, 5).t(),
        "odd": torch.randn(7, 3, device=device),
        "half": torch.randn(513, device=device).bfloat16(),
        "bytes": torch.arange(251, dtype=torch.uint8, device=device),
        "empty": torch.empty(0, 4, device=device),
        "nan": torch.full((33,), float("nan"), device=device),
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: t.clone().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for name, t in tensors.items()
    }


def gone(tensor: torch.Tensor) -> bool:
    """On CUDA the storage is empty; on CPU none of its whole pages is mapped."""
    if tensor.is_cuda:
        return tensor.untyped_storage().nbytes() == 0
    return tensor.nbytes > 2 * mmap.PAGESIZE and resident(tensor) == 0


def offloader(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Any:
    """The mover of the tensors' own platform."""
    device = next(iter(tensors.values())).device
    return platform.of(device).mover(tensors.values, tmp_path if device.type == "cpu" else None)


def on_cpu(tensors: Callable[[], Iterable[torch.Tensor]], directory: Path | None) -> Any:
    return platform.of(torch.device("cpu")).mover(tensors, directory)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_and_views_survive_and_the_second_time_allocates_nothing(device: str, tmp_path: Path) -> None:
    tensors = make(device)
    before, offload = bits(tensors), offloader(tensors, tmp_path)
    total = sum(
        s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors.values()}.values()
    )
    for _ in range(3):
        assert offload.nbytes() == total
        offload.offload()
        assert gone(tensors["base"])
        offload.onload()
        assert bits(tensors) == before
    assert offload.store is not None and offload.store.allocations == 1
    tensors["base"][17] = 42.0
    assert tensors["view"][0, 0] == 42.0
    offload.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.tuples(st.sampled_from(["offload", "onload", "prefetch"]), st.integers(0, 8))))
def test_any_order_of_calls_and_failures_keeps_the_bits(calls: list[tuple[str, int]], tmp_path: Path) -> None:
    tensors = make("cpu")
    before, offload = bits(tensors), offloader(tensors, tmp_path)
    offload.store = Flaky(offload.store)
    for name, transfers in calls:
        offload.store.left = transfers  # then the next one fails
        try:
            getattr(offload, name)()
        except OSError:
            pass
    offload.store.left = 100
    offload.onload()
    assert bits(tensors) == before
    offload.close()


class Flaky:
    """A store whose transfers fail after ``left`` of them."""

    def __init__(self, inner: FileStore) -> None:
        self.inner, self.left = inner, 100

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _transfer(self, call: Callable[..., None], *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("disk gone")
        call(*args)

    def put(self, offset: int, source: torch.Tensor) -> None:
        self._transfer(self.inner.put, offset, source)

    def get(self, offset: int, target: torch.Tensor) -> None:
        self._transfer(self.inner.get, offset, target)


def test_adam_goes_on_as_if_its_moments_had_never_left(tmp_path: Path) -> None:
    def train(away: bool) -> dict[str, bytes]:
        torch.manual_seed(0)
        shards = {"a": torch.randn(640, 9), "b": torch.randn(31), "none": torch.empty(0, 9)}
        optimizer = ShardedAdamW(shards, ["a"], TrainConfig(lr=0.1, weight_decay=0.1))
        offload = on_cpu(lambda: _moments(optimizer), tmp_path)
        assert offload.nbytes() == 0  # none before the first step, and asking makes none
        for _ in range(4):
            for param in optimizer.params.values():
                param.grad = torch.randn_like(param)
            optimizer.step(0.1)
            if away:
                assert offload.nbytes() == 2 * (4 * 640 * 9 + 512)  # 31 floats take a whole place in the block
                offload.offload()
                assert gone(_moments(optimizer)[0])
                offload.onload()
        return bits(shards)

    assert train(away=True) == train(away=False)


@pytest.mark.parametrize("on_disk", [False, True])
def test_drop_loses_contents_and_keeps_the_tensors(on_disk: bool, tmp_path: Path) -> None:
    tensor = torch.ones(10_000)
    offload = on_cpu(lambda: [tensor], tmp_path if on_disk else None)
    offload.drop()
    assert gone(tensor) and offload.nbytes() == 40_000
    offload.onload()
    assert tensor.fill_(2.0).sum() == 20_000


class Synchronous(FileStore):
    """A Store whose transfers are over when they return."""

    def wait(self) -> None: ...


def test_a_store_is_made_when_it_is_first_needed(tmp_path: Path) -> None:
    tensor, made = torch.arange(10_000.0), []

    def make_store(device: torch.device) -> Synchronous:
        made.append(device)
        return Synchronous(tmp_path)

    offload = FlatOffload(lambda: [tensor], store=make_store)
    offload.drop()
    offload.onload()
    assert offload.store is None and made == []
    tensor.copy_(torch.arange(10_000.0))
    for _ in range(2):
        offload.offload()
        assert gone(tensor)
        offload.onload()
    assert torch.equal(tensor, torch.arange(10_000.0)) and made == [torch.device("cpu")]
    offload.close()


def test_gradients_may_be_other_tensors_each_time(tmp_path: Path) -> None:
    current = [torch.ones(100)]
    offload = on_cpu(lambda: current, tmp_path)
    for size in (100, 0, 300, 200):
        current[:] = [torch.full((size,), float(size))] if size else []
        offload.offload()
        offload.onload()
        assert all(bool((t == size).all()) for t in current)


def test_refusals_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set memory.offload_dir"):
        on_cpu(lambda: [torch.ones(3)], None).offload()
    with pytest.raises(ValueError, match="memory.offload_dir=.*missing: no such directory"):
        on_cpu(lambda: [torch.ones(3)], tmp_path / "missing")


def test_a_memory_file_system_is_recognised() -> None:
    assert in_memory("/dev/shm")
    assert not in_memory("/proc")


def mapped(tensors: list[torch.Tensor], tmp_path: Path) -> MappedOffload:
    return MappedOffload(lambda: tensors, directory=tmp_path)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's whole pages that are mapped in this process now. Looks, and touches nothing."""
    start, length = pages.whole_pages(tensor.data_ptr(), tensor.nbytes)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(start // mmap.PAGESIZE * 8)
        entries = torch.frombuffer(bytearray(file.read(length // mmap.PAGESIZE * 8)), dtype=torch.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE  # bit 63: present


def test_mapped_memory_leaves_without_a_copy_and_keeps_its_bits(tmp_path: Path) -> None:
    tensors = make("cpu")
    before, addresses = bits(tensors), {name: t.data_ptr() for name, t in tensors.items()}
    offload = mapped(list(tensors.values()), tmp_path)
    puts, put = [], offload.store.put
    offload.store.put = lambda offset, source: (puts.append(offset), put(offset, source))  # type: ignore
    total = offload.nbytes()
    for _ in range(3):
        assert offload.nbytes() == total
        offload.offload()
        assert resident(tensors["base"]) == 0
        assert len(puts) == 1, "the one tensor that has whole pages is copied, once"
        offload.prefetch()
        offload.onload()
        assert resident(tensors["base"]) == pages.whole_pages(tensors["base"].data_ptr(), tensors["base"].nbytes)[1]
        assert bits(tensors) == before
    assert offload.store.allocations == 1
    tensors["base"][17] = 42.0  # what is changed while it is here is what comes back
    offload.offload()
    offload.onload()
    assert tensors["view"][0, 0] == 42.0 and {name: t.data_ptr() for name, t in tensors.items()} == addresses


def test_mapped_memory_reads_right_while_it_is_away(tmp_path: Path) -> None:
    tensor = torch.arange(100_000.0)
    offload = mapped([tensor], tmp_path)
    offload.offload()
    assert torch.equal(tensor, torch.arange(100_000.0)) and resident(tensor) > 0


def test_mapped_memory_frees_what_the_system_counts(tmp_path: Path) -> None:
    """PSS falls by at least 95 % of what the tensors held, many small ones among them, and comes back."""
    tensors = [torch.ones(n) for n in (8_000_000, *[1_000_000] * 6, *[40_000] * 50)]
    offload = mapped(tensors, tmp_path)
    offload.offload(), offload.onload()
    held, awake = offload.nbytes(), host_memory().pss
    offload.offload()
    assert awake - host_memory().pss >= 0.95 * held
    offload.onload()
    assert host_memory().pss >= awake - 0.05 * held
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_mapped_memory_is_private_again_when_its_mover_goes(how: str, tmp_path: Path) -> None:
    tensors = [torch.arange(50_000.0), torch.arange(7_000.0)]
    offload = mapped(tensors, tmp_path)
    offload.offload()
    start, _ = pages.whole_pages(tensors[0].data_ptr(), tensors[0].nbytes)
    assert str(tmp_path) in (pages.shared_backings([start])[start])
    if how == "close":
        offload.close()
    else:
        del offload
        gc.collect()
    assert not pages.shared_backings([start])
    assert all(torch.equal(t, torch.arange(float(len(t)))) for t in tensors)


def test_mapped_tensors_may_be_replaced(tmp_path: Path) -> None:
    """As the moments are when a checkpoint is loaded; the old ones are ordinary memory again."""
    old, current = torch.arange(30_000.0), []
    current.append(old)
    offload = MappedOffload(lambda: current, directory=tmp_path)
    offload.offload()
    current[:] = [torch.arange(60_000.0), torch.arange(20_000.0)]
    offload.offload()
    start, _ = pages.whole_pages(old.data_ptr(), old.nbytes)
    assert not pages.shared_backings([start]) and torch.equal(old, torch.arange(30_000.0))
    offload.onload()
    assert all(torch.equal(t, torch.arange(float(len(t)))) for t in current)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(30_000.0), torch.arange(40_000.0)]
    offload = mapped(tensors, tmp_path)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"memory\.offload_dir=.*no room"):
            offload.offload()
    offload.store = Flaky(offload.store)
    offload.store.left = 1  # the second tensor's write fails
    with pytest.raises(OSError, match="disk gone"):
        offload.offload()
    assert all(torch.equal(t, torch.arange(float(len(t)))) for t in tensors)
    offload.store.left = 100
    offload.offload()
    assert resident(tensors[1]) == 0
    offload.onload()
    assert all(torch.equal(t, torch.arange(float(len(t)))) for t in tensors)


def test_mapped_memory_must_not_be_a_memfds(tmp_path: Path) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 16 * mmap.PAGESIZE)
    tensor = torch.frombuffer(mmap.mmap(fd, 16 * mmap.PAGESIZE), dtype=torch.float32)
    with pytest.raises(ValueError, match="other processes map"):
        mapped([tensor], tmp_path).offload()
    os.close(fd)
