"""vLLM in its own processes: the in-process engine, one process per tensor-parallel rank, all told the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.distributed.world import World
from hybridengine.engines.rollout.remote.messages import Job, Output, Start
from hybridengine.engines.rollout.remote.shared_weights import Lender, Loan
from hybridengine.engines.rollout.vllm.engine.engine import VLLMEngine
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice


class VLLMHost:
    """See Host. Process ``start.rank`` of the replica; every call is made in all of them, so their steps match."""

    def __init__(self, start: Start) -> None:
        rank, size = start.rank, start.rollout.tp
        device = torch.device("cuda", rank) if start.is_cuda else torch.device("cpu")
        if start.is_cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if start.is_cuda else "gloo",
            init_method=f"file://{start.scratch}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=start.timeout_seconds),
        )
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, device=device)
        self._engine = _LendingEngine(
            start.model_path,
            start.rollout,
            world=world,
            max_model_len=start.max_model_len,
            seed=start.seed,
            eos_token_ids=start.stop,
            trust_remote_code=start.trust_remote_code,
        )
        self._rank = rank

    def children(self) -> Sequence[int]:
        return ()

    def describe(self) -> dict[str, int]:
        return {"kv_cache": self._engine.nbytes("kv_cache")}

    def loans(self) -> list[Loan]:
        return [self._engine.lender.loan]

    def layout(self, params: Mapping[str, ParamSpec]) -> list[tuple[TensorSlice, ...]]:
        return [self._engine.layout(params)]

    def generate(self, job: Job, report: Callable[[list[Output]], None]) -> None:
        self._add(job)
        left = {request.name for request in job.requests}
        while left:
            finished = [Output(*output) for output in self._engine.step() if output[3] is not None]
            left.difference_update(output.name for output in finished)
            if finished and self._rank == 0:
                report(finished)

    def advance(self, job: Job | None) -> list[Output]:
        if job is not None:
            self._add(job, streaming=True)
        return self._answer([Output(*output) for output in self._engine.step()])

    def abort(self, names: Sequence[str]) -> list[Output]:
        return self._answer([Output(name, *drawn, None) for name, drawn in self._engine.abort(names).items()])

    def begin_update(self) -> None:
        self._engine.begin_update()

    def finish_update(self, version: int) -> None:
        self._engine.lender.check()
        self._engine.finish_update(version)

    def sleep(self, tags: Sequence[str]) -> None:
        self._engine.sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        self._engine.wake(tags)

    def checksums(self) -> list[dict[str, int]]:
        live = self._engine.live_tensors().items()
        return [{name: int(t.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for name, t in live}]

    def close(self) -> None:
        self._engine.close()

    def _add(self, job: Job, *, streaming: bool = False) -> None:
        self._engine.check_servable()
        for request in job.requests:
            self._engine.add_request(
                request.name,
                request.token_ids,
                job.params,
                max_tokens=request.max_tokens,
                seed=request.seed,
                streaming=streaming,
            )

    def _answer(self, outputs: list[Output]) -> list[Output]:
        """Every process has the same outputs; the first one's are sent."""
        return outputs if self._rank == 0 else []


class _LendingEngine(VLLMEngine):
    """The in-process engine with its weights lent to the trainer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.world.is_cuda:
            del self._weights  # it holds the memory that moves now
        self.lender = Lender(dict(self.model.named_parameters()))
        if not self.world.is_cuda:
            self._weights: Any = _LentSleeper(self.lender)


class _LentSleeper:
    """Sleeper's two methods, for weights that are mapped elsewhere as well."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender

    def sleep(self) -> None:
        self._lender.free()

    def wake(self) -> None:
        """Memory comes back as it is written, zeroed."""
