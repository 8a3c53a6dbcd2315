"""What bench_sleep.py times: both engines of one rank under two settings of memory, and plain copies beside them."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridengine.config import Config, DataConfig, MemoryConfig, ModelConfig, RolloutConfig, TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.generate import generate
from hybridengine.engines.train.base import LossResult, MicroBatch
from hybridengine.memory.residency import GRADS, OPTIMIZE, OPTIMIZER, ROLLOUT, TRAIN, State
from hybridengine.memory.sleeper import Sleeper
from hybridengine.memory.tracker import PhaseMemory, host_memory
from hybridengine.placement.colocated import build_engines, time_share
from hybridengine.placement.parts import EngineOptions
from hybridengine.platform.cpu.mapped import MappedOffload
from hybridengine.platform.offload import FlatOffload
from hybridengine.platform.storages import as_bytes, distinct
from hybridengine.tracing import PhaseTimer
from hybridengine.types import Prompt, Sample, SamplingParams, Trajectory

#: Largest read or write, as the offload file has it.
CALL_BYTES = 1 << 30


class Subject:
    """The FSDP engine and a rollout engine on one rank, under phases that move everything or nothing.

    Args:
        directory: where bytes wait on a CPU; unused on a GPU, whose bytes wait in page-locked host memory.
    """

    def __init__(
        self, world: World, path: Path, directory: Path, *, prompts: int, samples: int, prompt_tokens: int,
        response_tokens: int, kv_cache_gib: float, dtype: str,
    ) -> None:  # fmt: skip
        self.world, self.directory = world, directory
        self.on_gpu = world.platform.separate_memory
        self.engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
        longest = prompt_tokens + response_tokens
        self.config = Config(
            model=ModelConfig(path=str(path)),
            data=DataConfig(train="unused"),
            train=TrainConfig(lr=1e-6, dtype=dtype, max_tokens_per_micro_batch=max(2048, longest)),
            rollout=RolloutConfig(engine=self.engine, dtype=dtype, kv_cache_gib=kv_cache_gib, max_num_seqs=256),
            memory=MemoryConfig(offload_dir=None if self.on_gpu else str(directory)),
        )
        options = EngineOptions(
            model_path=path, max_model_len=longest, total_steps=1_000_000, eos_token_ids=[], with_entropy=False,
            reference=False,
        )  # fmt: skip
        built = build_engines(self.config, world, options, log_rank0=lambda text: None)
        self.train: Any = built.train
        self.rollout: Any = built.rollout
        timer = PhaseTimer(synchronize=world.platform.synchronize)
        self.sharding = time_share(self.config, world, built, timer, log_rank0=lambda text: None)
        self.phases = self.sharding.phases
        self.residency, self.tracker = self.phases.residency, self.phases.tracker
        #: Gradients too, though a run never needs them to leave.
        self.away = {**self.residency.rest, GRADS: State.HOST}
        sync = self.sharding.weight_sync.run

        def measured_sync(version: int) -> None:
            with self.body():
                sync(version)

        self.sharding.weight_sync.run = measured_sync  # type: ignore[method-assign]
        self.params = SamplingParams(n=samples, max_tokens=response_tokens)
        self.prompts = [
            Prompt(index=i, token_ids=[3 + (11 * i + 7 * j) % 1000 for j in range(prompt_tokens)])
            for i in range(prompts)
        ]

    def step(self, *, moving: bool) -> tuple[float, list[PhaseMemory]]:
        """One rollout and one optimizer step; (seconds, memory per phase), from the state that steps end in."""
        self.residency.rest = dict(self.away) if moving else {}
        if moving:
            self.residency.enter(OPTIMIZE)
        else:
            for owner in self.residency.movers:
                self.residency.move(owner, State.DEVICE)
        self.synchronize()
        begin = time.perf_counter()
        self.sharding.enter_rollout_mode()
        with self.phases("rollout", ROLLOUT), self.body():
            found = generate(self.rollout, self.prompts, self.params, seed=1, step=self.train.version)
        with self.phases("forward_backward", TRAIN), self.body():
            self.train.forward_backward(as_samples(found), loss, before_last_backward=self.fetch)
        with self.phases("optimizer", OPTIMIZE), self.body():
            self.train.optimizer_step()
        self.synchronize()
        seconds = time.perf_counter() - begin
        self.tracker.metrics()
        return seconds, self.tracker.last_step

    def body(self) -> Any:
        """A phase without the moves that make room for it."""
        return self.phases.measured("body")

    def fetch(self) -> None:
        self.phases.prefetch(OPTIMIZER, during="forward_backward")

    def make_gradients(self) -> None:
        self.train.forward_backward([as_samples(self._answers())[0]], loss)

    def _answers(self) -> list[Trajectory]:
        return [
            Trajectory(
                prompt=prompt, sample_index=0, token_ids=[5 + j for j in range(self.params.max_tokens)],
                logprobs=[0.0] * self.params.max_tokens, versions=[0] * self.params.max_tokens, truncated=True,
            )
            for prompt in self.prompts
        ]  # fmt: skip

    def fill_rollout(self) -> None:
        """Touch what the rollout engine holds: zero pages of fresh memory count as no memory."""
        holder = getattr(self.rollout, "_device", self.rollout)  # vLLM's memory is its device's
        for name in ("_weights", "kv_blocks"):
            sleeper = getattr(holder, name, None)
            if isinstance(sleeper, Sleeper):
                for storage, _ in sleeper.storages:
                    as_bytes(storage).fill_(1)

    def used(self) -> int:
        """Bytes on the device now: the GPU's, or this process's share of host memory."""
        self.synchronize()
        self.world.platform.release_cached()
        memory = self.world.platform.memory(self.world.device)
        return host_memory().pss if memory is None else memory.used

    def synchronize(self) -> None:
        self.world.platform.synchronize()

    def timed(self, run: Callable[[], None]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def piece_sizes(self, owner: str) -> list[int]:
        """Bytes of the storages an owner's copies are made of."""
        mover = self.residency.movers[owner]
        assert isinstance(mover, FlatOffload | MappedOffload)
        return [storage.nbytes() for storage in distinct(mover._tensors())]

    def close(self) -> None:
        self.sharding.close()


class PinnedCopy:
    """One cudaMemcpyAsync of ``nbytes`` each way, between device memory and page-locked host memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def out(self) -> None:
        self.host.copy_(self.device, non_blocking=True)

    def back(self) -> None:
        self.device.copy_(self.host, non_blocking=True)

    def close(self) -> None:
        del self.host, self.device


class FileCopy:
    """The same bytes to and from a file of the same directory, in calls of the same sizes; memory that never left."""

    def __init__(self, sizes: list[int], directory: Path) -> None:
        self.buffer = mmap.mmap(-1, sum(sizes))
        self.view = memoryview(self.buffer)
        for start in range(0, len(self.view), mmap.PAGESIZE):
            self.view[start] = 1
        self.file = tempfile.TemporaryFile(dir=directory)
        os.posix_fallocate(self.file.fileno(), 0, len(self.view))
        self.calls, start = [], 0
        for size in sizes:
            for offset in range(0, size, CALL_BYTES):
                self.calls.append((start + offset, min(CALL_BYTES, size - offset)))
            start += size
        self.out()

    def out(self) -> None:
        for start, size in self.calls:
            assert os.pwrite(self.file.fileno(), self.view[start : start + size], start) == size

    def back(self) -> None:
        for start, size in self.calls:
            assert os.preadv(self.file.fileno(), [self.view[start : start + size]], start) == size

    def close(self) -> None:
        self.file.close()
        self.view.release()
        self.buffer.close()


class MemoryCopy:
    """The same bytes from one place in memory to another, both always there."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.one, self.other = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def out(self) -> None:
        ctypes.memmove(self.other.data_ptr(), self.one.data_ptr(), self.nbytes)

    back = out

    def close(self) -> None:
        del self.one, self.other


def as_samples(found: list[Trajectory]) -> list[Sample]:
    return [
        Sample(
            prompt_ids=t.prompt.token_ids,
            response_ids=t.token_ids,
            loss_mask=[True] * len(t.token_ids),
            advantages=[1.0 - 2.0 * (t.sample_index % 2)] * len(t.token_ids),
        )
        for t in found
    ]


def loss(logprobs: torch.Tensor, entropy: torch.Tensor | None, micro: MicroBatch) -> LossResult:
    return LossResult(-(logprobs * micro.advantages).mean(), {})
