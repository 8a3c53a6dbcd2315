"""VLLMHost: the in-process vLLM engine in processes of its own, one per tensor-parallel rank; all get every call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridengine import platform
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.messages import Job, Output, Start
from hybridengine.engines.rollout.remote.shared_weights import SharedWeightsHandle, byte_sums
from hybridengine.engines.rollout.vllm.engine import VLLMEngine
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice


class VLLMHost:
    """See Host. Process ``start.rank`` of the replica; every call is made in all of them, so their steps match."""

    def __init__(self, start: Start) -> None:
        rank, size = start.rank, start.rollout.tp
        device = platform.local_device(rank)
        here = platform.of(device)
        here.bind(device, local_size=size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # launch.py has shared the cores out
        dist.init_process_group(
            here.backend,
            init_method=f"file://{start.scratch}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=start.timeout_seconds),
        )
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)
        self._engine = VLLMEngine(
            start.model_path,
            start.rollout,
            world=world,
            max_model_len=start.max_model_len,
            seed=start.seed,
            eos_token_ids=start.stop,
            trust_remote_code=start.trust_remote_code,
            exports_weights=True,
        )
        self._exporter = self._engine.export_weights()
        self._rank = rank

    def children(self) -> Sequence[int]:
        return ()

    def describe(self) -> dict[str, int]:
        return {"kv_cache": self._engine.nbytes("kv_cache")}

    def shared_weights(self) -> list[SharedWeightsHandle]:
        return [self._exporter.handle]

    def layout(self, params: Mapping[str, ParamSpec]) -> list[tuple[TensorSlice, ...]]:
        return [self._engine.layout(params)]

    def advance(self, job: Job | None) -> list[Output]:
        if job is not None:
            self._add(job)
        return self._answer([Output(*tokens) for tokens in self._engine.requests.step()])

    def abort(self, names: Sequence[str]) -> list[Output]:
        return self._answer([Output(name, *drawn, None) for name, drawn in self._engine.requests.abort(names).items()])

    def begin_update(self) -> None:
        self._engine.begin_update()

    def finish_update(self, version: int) -> None:
        self._exporter.check()
        self._engine.finish_update(version)

    def sleep(self, tags: Sequence[str]) -> None:
        self._engine.sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        self._engine.wake(tags)

    def checksums(self) -> list[dict[str, int]]:
        return [byte_sums(self._engine.live_tensors())]

    def close(self) -> None:
        self._engine.close()

    def _add(self, job: Job) -> None:
        self._engine.check_servable()
        for request in job.requests:
            self._engine.requests.add(request, job.params, interruptible=True)

    def _answer(self, outputs: list[Output]) -> list[Output]:
        """Every process has the same outputs; the first one's are sent."""
        return outputs if self._rank == 0 else []
