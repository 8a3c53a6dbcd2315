"""Each CUDA branch that whole runs do not pass, over the stand-ins: refusals, rare ways, what the doctor asks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine import native, native_build, native_cuda, platform
from hybridengine.checkpoint import checkpointer
from hybridengine.config import Config, RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.sglang import patches
from hybridengine.engines.rollout.sglang.device import SGLangOnCuda
from hybridengine.engines.rollout.vllm.cuda import VLLMOnCuda
from hybridengine.engines.train.megatron import cpu as megatron_on_cpu
from hybridengine.engines.train.megatron import kernels
from hybridengine.platform.cuda import CudaPlatform, stream_memory
from hybridengine.platform.cuda.memory import CudaPool, PinnedStore
from hybridengine.platform.offload import FlatOffload
from hybridengine.platform.storages import as_bytes
from hybridengine.sync.transfer import cuda_ipc
from hybridengine.sync.transfer.base import LayoutChangedError
from hybridengine.tools import doctor, doctor_memory
from hybridengine.validate import contradictions, here
from tests.cuda import standin, streams
from tests.unit.test_native_cuda import compile_emulated

CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[standin.Device]:
    with standin.installed() as device:
        yield device


@pytest.fixture
def world(gpu: standin.Device) -> World:
    return World(device=CPU)


# -- platform --------------------------------------------------------------------------------------


def test_arithmetic_is_torchs(world: World) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(world.platform.mm(a, b), a @ b)
    for total in (torch.ones(3, 5), torch.ones(3, 5, dtype=torch.float64)):
        world.platform.add_mm(total, a, b)
        torch.testing.assert_close(total, (1 + a @ b).to(total.dtype), rtol=1e-6, atol=1e-6)
    assert world.platform.has_varlen_attention(torch.bfloat16) and not world.platform.has_varlen_attention(
        torch.float32
    )


def test_generators_are_saved_and_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", kept.append)
    state = checkpointer._rng_state()
    checkpointer._set_rng_state(state)
    checkpointer._set_rng_state(state | {"cuda": None})  # of a run on a CPU
    assert [list(found) for found in kept] == [list(range(16))]


def test_finishing_boxes_waits_for_the_stream(world: World) -> None:
    pending: list[int] = []
    streams.Stream.current.submit(lambda: pending.append(1))
    world.platform.finish_boxes(CPU)
    assert pending == [1]


def test_a_pool_gives_zeros_and_lets_go(gpu: standin.Device) -> None:
    pool, storage = CudaPool(), torch.full((16,), 7.0).untyped_storage()
    pool.release(storage)
    assert storage.nbytes() == 0
    pool.take(storage, 64, zero=True)
    assert pool._pool is not None and not as_bytes(storage).any() and storage.nbytes() == 64
    pool.all_released()
    assert pool._pool is None


def test_page_locked_memory_is_taken_once_and_returned(world: World) -> None:
    locked = streams_driver().locked
    tensor = torch.randn(1000)
    kept = tensor.clone()
    moves = world.platform.mover(lambda: [tensor], None)
    assert isinstance(moves, FlatOffload)
    for _ in range(2):
        moves.offload()
        assert tensor.untyped_storage().nbytes() == 0 and len(locked) == 1
        moves.onload()
        assert torch.equal(tensor, kept)
    moves.close()
    assert not locked


def test_page_locked_memory_that_the_system_refuses(gpu: standin.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *a: 2))
    with pytest.raises(MemoryError, match=r"could not be page-locked \(CUDA error 2\).*memory.offload_optimizer"):
        PinnedStore(CPU).reserve(1 << 20)


def streams_driver() -> streams.Driver:
    found = stream_memory.driver()
    assert isinstance(found, streams.Driver)
    return found


# -- libraries -------------------------------------------------------------------------------------


def test_the_driver_library_has_its_calls_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's Driver takes the place of libcuda, so loading it is tested on its own."""
    calls = {name: SimpleNamespace() for name in (
        "cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2", "cuMemHostGetDevicePointer_v2", "cuDeviceGetAttribute",
    )}  # fmt: skip
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(**calls)

    monkeypatch.setattr(ctypes, "CDLL", load)
    stream_memory.driver.cache_clear()
    stream_memory.driver()
    stream_memory.driver.cache_clear()
    assert asked == ["libcuda.so.1"] and all(len(call.argtypes) in (3, 4) for call in calls.values())


def test_a_call_that_the_driver_refuses(gpu: standin.Device) -> None:
    with pytest.raises(RuntimeError, match="cudaHostRegister failed with CUDA error 712"):
        words = [stream_memory.HostWords(None, 4096, 4096) for _ in range(2)]
        assert words


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """csrc/boxes.cu, compiled for emulated threads, where the CUDA build would be."""
    monkeypatch.setattr(native_cuda, "_LIBRARY", tmp_path / "boxes.so")
    native_cuda.load.cache_clear()
    yield compile_emulated(tmp_path / "boxes.so")
    native_cuda.load.cache_clear()


def test_the_box_library_is_loaded_and_known(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_cuda.load().he_cuda_box_bytes() == native.BOX_DTYPE.itemsize
    assert native_cuda.status() == ("built; no CUDA here, so it is not needed", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert native_cuda.status() == ("built", "")
    native_cuda.load.cache_clear()
    monkeypatch.setattr(native_cuda, "BOX_DTYPE", np.dtype("u1"))
    with pytest.raises(RuntimeError, match="was built from other sources: run"):
        native_cuda.load()
    what, remedy = native_cuda.status()
    assert what.startswith("built, but") and "build-cuda" in remedy
    library.unlink()
    with pytest.raises(RuntimeError, match="not built: run `python -m hybridengine.native build-cuda`"):
        native_cuda.load()
    assert native_cuda.status()[0] == "not built"


def test_building_is_for_this_machines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(native_build, "compile_cuda", lambda sources, output, arch: asked.update(arch=arch, to=output))
    native_cuda.build()
    assert asked == {"arch": "native", "to": native_cuda._LIBRARY}


def test_box_copies_that_are_refused(gpu: standin.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.zeros(1, native.BOX_DTYPE)
    row["op"] = 99
    with pytest.raises(ValueError, match="box 0 has an unknown op"):
        native_cuda.run_boxes(row, None, CPU)
    monkeypatch.setattr(streams.BoxLibrary, "he_cuda_run_boxes", lambda *arguments: 700)
    row["op"] = 0
    with pytest.raises(RuntimeError, match="could not be launched: CUDA error 700"):
        native_cuda.run_boxes(row, None, CPU)


# -- weights between processes ---------------------------------------------------------------------

PEER = cuda_ipc.Peer(standin.UUID, follows_words=True)
OBSTACLES = {
    "none": (PEER, ""),
    "hidden": (PEER._replace(uuid="GPU-other"), "the GPU of rank 1 is hidden from it (CUDA_VISIBLE_DEVICES)"),
    "no-words": (PEER._replace(follows_words=False), "the driver of rank 1 has no 64-bit stream memory operations"),
    "expandable": (PEER._replace(expandable=True), "rank 1 allocates expandable segments"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_why_a_rank_cannot_map_another(gpu: standin.Device, case: str) -> None:
    peer, reason = OBSTACLES[case]
    assert cuda_ipc.obstacle(torch.device("cuda", 0), [PEER, peer]) == reason


def test_gpus_without_peer_access(gpu: standin.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: False)
    assert cuda_ipc.obstacle(torch.device("cuda", 1), [PEER]) == "its GPU has no peer access to rank 0's"
    with pytest.raises(LayoutChangedError, match="GPU GPU-other of another rank is not visible here"):
        cuda_ipc._index_of("GPU-other")


def test_a_peer_says_what_its_allocator_does(gpu: standin.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_ipc.describe_peer(CPU) == PEER
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert cuda_ipc.describe_peer(CPU).expandable


def test_exported_memory_stays_and_empty_tensors_need_no_handle(gpu: standin.Device) -> None:
    region = cuda_ipc.CudaRegion({"empty": torch.empty(0, 4), "full": torch.ones(8)}, readers=1)
    with pytest.raises(RuntimeError, match="can't leave the GPU"):
        region.release()
    assert list(region.table) == ["full"]
    region.close()


# -- engines ---------------------------------------------------------------------------------------


def test_vllm_refuses_the_cpus_sampler_and_to_wake_without_room(
    world: World, gpu: standin.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="rollout.sampler=seeded: its kernel is for CPUs"):
        VLLMOnCuda(RolloutConfig(sampler="seeded"), world, exports_weights=False)
    device = VLLMOnCuda(RolloutConfig(), world, exports_weights=False)
    assert device.can_sleep(0) == set() and device.can_sleep(2) == {"weights", "kv_cache"}
    asleep = [
        SimpleNamespace(tag=tag, is_asleep=True, handle=(0, nbytes, 0, 0))
        for tag, nbytes in (("weights", 3 << 30), ("workspace", 1 << 30), ("kv_cache", 40 << 30))
    ]
    monkeypatch.setattr(device, "_allocations", lambda: asleep)
    gpu.others = 62 * standin.GIB
    with pytest.raises(torch.OutOfMemoryError, match=r"weights \(3.00 GiB\), workspace \(1.00 GiB\): 2.00 of 64.00"):
        device._check_room({"weights"})


class SGLang:
    """sglang.Engine's two calls, by srt/managers/scheduler_components/weight_updater.py of 0.5: refused unless idle;
    a tag that is asleep already or not at all fails in the memory saver."""

    def __init__(self) -> None:
        self.idle, self.asleep = False, set[str]()

    def workers(self, method: str) -> list[Any]:
        assert method == "flush"
        self.idle = True
        return []

    def release_memory_occupation(self, tags: list[str]) -> None:
        assert self.idle, "release_memory_occupation should be called only when server is idle."
        assert not self.asleep & set(tags)
        self.asleep |= set(tags)

    def resume_memory_occupation(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)


def test_sglang_puts_cache_and_graphs_to_sleep(gpu: standin.Device) -> None:
    engine, device = SGLang(), SGLangOnCuda()
    device.prepare()
    device.launching()
    rollout = RolloutConfig(engine="sglang", gpu_memory_utilization=0.5, sleep_level=1, enforce_eager=True)
    options = device.options(SimpleNamespace(rollout=rollout))  # type: ignore[arg-type]
    assert options["enable_memory_saver"] and options["mem_fraction_static"] == 0.5 and options["disable_cuda_graph"]
    for _ in range(2):
        device.sleep(engine, engine.workers, ["kv_cache"])
        assert engine.asleep == {"kv_cache", "cuda_graph"}
        device.wake(engine, ["kv_cache"])
        assert not engine.asleep
        engine.idle = False


def test_sglangs_weights_stay_out_of_its_memory_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saver:
        def region(self, tag: str, enable_cpu_backup: bool = False) -> contextlib.AbstractContextManager[str]:
            return contextlib.nullcontext(tag)

    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.constants", "sglang.srt.utils")}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    adapter: Any = SimpleNamespace(_TorchMemorySaverAdapterReal=Saver)
    monkeypatch.setattr(packages["sglang.srt.constants"], "GPU_MEMORY_TYPE_WEIGHTS", "weights", raising=False)
    monkeypatch.setattr(packages["sglang.srt.utils"], "torch_memory_saver_adapter", adapter, raising=False)
    patches.weights_outside_memory_saver()
    with Saver().region("weights", enable_cpu_backup=True) as weights, Saver().region("kv_cache") as cache:
        assert weights is None and cache == "kv_cache"


def test_megatron_is_left_as_it_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plain = torch.Tensor.type, torch.Tensor.cuda
    with megatron_on_cpu.cuda_type_names(), megatron_on_cpu.cuda_is_identity():
        assert (torch.Tensor.type, torch.Tensor.cuda) == plain


def test_transformer_engine_that_lacks_a_library(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'nvidia.cudnn'", name="nvidia.cudnn")

    assert world.platform.runs_transformer_engine
    monkeypatch.setattr(kernels.importlib, "import_module", missing)
    assert kernels.obstacle(world.platform).startswith("transformer_engine does not import (No module named 'nvidia")


# -- what is asked before a run --------------------------------------------------------------------


def test_what_a_gpu_run_refuses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    two = World(size=2, local_size=2, device=CPU)
    config = Config()
    config.memory.offload_dir, config.sync.method = "/tmp", "pull"
    assert "memory.offload_dir=/tmp: for CPU runs" in next(contradictions._pull(config, two))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "sync.method=collective" in next(here._allocator(config, two))
    config.train.engine, config.train.transformer_engine = "megatron", "true"
    found = [line for line in here._packages(config, two) if "transformer_engine" in line]
    assert len(found) == 1 and "transformer_engine is not installed" in found[0]


def test_the_doctor_asks_every_gpu(gpu: standin.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor_memory.gpus_here() == (1, 64.0)
    assert [item.detail for item in doctor.check_devices()] == ["1 × stand-in for a GPU, 64 GiB each"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [item.what for item in doctor.check_devices()] == ["devices", "peer access"]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: False)
    gpu.others = 32 * standin.GIB
    found = list(doctor.check_devices())
    assert [(item.what, item.status) for item in found[1:]] == [
        ("peer access", doctor.WARN), ("GPU 0", doctor.WARN), ("GPU 1", doctor.WARN),
    ]  # fmt: skip
    assert "only 32.0 of 64.0 GiB free" in found[2].detail


def test_the_stand_in_leaves_no_trace() -> None:
    before = dict(vars(torch.cuda)), torch.UntypedStorage._share_cuda_
    with standin.installed():
        assert torch.cuda.device_count() == 1 and platform.of(CPU).name == "cuda"
    assert (dict(vars(torch.cuda)), torch.UntypedStorage._share_cuda_) == before and platform.of(CPU).name == "cpu"


def test_collectives_are_recorded_where_the_user_has_not_said_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    )  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")  # put back what it was in the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    CudaPlatform().record_collectives(tmp_path)
    prefix = f"{tmp_path}/nccl_"
    assert [os.environ[name] for name in names] == ["7", "2000", prefix, prefix, "1"]
