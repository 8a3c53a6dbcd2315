"""SGLangHost: SGLang's offline Engine in a process of its own, called through the channel."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.engines.rollout.remote.messages import Job, Output, Request, Start
from hybridengine.engines.rollout.remote.shared_weights import SharedWeightsHandle
from hybridengine.engines.rollout.sglang.device import DEVICES, SGLangDevice
from hybridengine.sync.plan.spec import ParamSpec, TensorSlice
from hybridengine.types import SamplingParams

#: SGLang takes prompts of at most the context length less this; no sample of ours goes beyond max_model_len.
_RESERVED_TOKENS = 8


class SGLangHost:
    """See Host. One process for the whole tensor-parallel group; SGLang starts a scheduler process per rank itself.

    A scheduler that raises sends SIGQUIT to its parent, which then kills its whole process tree: that parent is this
    process, and the tree ends here.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._scratch = start.scratch
        self._calls = 0
        self._streaming: dict[str, asyncio.Task[Any]] = {}
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        self._device = DEVICES[start.platform]()
        self._device.prepare()
        self._engine = _build(start, self._device)
        self._workers: list[dict[str, Any]] = self._all("describe")

    # -- what it is --------------------------------------------------------------------------------

    def children(self) -> Sequence[int]:
        return [worker["pid"] for worker in self._workers]

    def describe(self) -> dict[str, int]:
        return {"kv_cache": self._workers[0]["kv_cache"]}

    def shared_weights(self) -> list[SharedWeightsHandle]:
        return [worker["weights"] for worker in self._workers]

    def layout(self, params: Mapping[str, ParamSpec]) -> list[tuple[TensorSlice, ...]]:
        file = self._scratch / "params"
        file.write_bytes(pickle.dumps(dict(params)))
        return self._all("layout", params=str(file))

    # -- generation --------------------------------------------------------------------------------

    def advance(self, job: Job | None) -> list[Output]:
        return self._engine.loop.run_until_complete(self._advance(job))

    async def _advance(self, job: Job | None) -> list[Output]:
        if job is not None:
            if not self._streaming:
                self._all("hold")
            for request in job.requests:
                self._streaming[request.name] = asyncio.create_task(self._submit(request, job.params))
        while True:
            await asyncio.sleep(0)
            found = self._all("step", names=list(self._streaming))[0]
            if found is not None:
                break
            await asyncio.sleep(0.001)
        finished = [output.name for output in found if output.reason is not None]
        await self._forget(finished)
        return found

    def abort(self, names: Sequence[str]) -> list[Output]:
        self._all("abort", names=list(names))
        self._engine.loop.run_until_complete(self._forget(names))
        return []

    async def _forget(self, names: Sequence[str]) -> None:
        """Let SGLang's own bookkeeping of finished samples end; after the last one batches run freely again."""
        await asyncio.gather(*(self._streaming.pop(name) for name in names), return_exceptions=True)
        if names and not self._streaming:
            self._all("release")

    def _submit(self, request: Request, params: SamplingParams) -> Any:
        greedy = params.temperature == 0
        return self._engine.async_generate(
            input_ids=request.token_ids,
            sampling_params={
                "temperature": params.temperature,
                "top_p": 1.0 if greedy else params.top_p,
                "top_k": -1 if greedy or not params.top_k else params.top_k,
                "min_p": 0.0 if greedy else params.min_p,
                "max_new_tokens": request.max_tokens,
                "stop_token_ids": list(self._start.stop),
                "sampling_seed": None if greedy else request.seed,
                "skip_special_tokens": False,
            },
            return_logprob=True,
            rid=request.name,
        )

    # -- weights and memory ------------------------------------------------------------------------

    def begin_update(self) -> None:
        if self._streaming:
            raise RuntimeError("the weights can't be updated while requests are running")

    def finish_update(self, version: int) -> None:
        self._all("finish_update")

    def sleep(self, tags: Sequence[str]) -> None:
        self._device.sleep(self._engine, self._all, tags)

    def wake(self, tags: Sequence[str]) -> None:
        self._device.wake(self._engine, tags)

    def checksums(self) -> list[dict[str, int]]:
        return self._all("checksums")

    def close(self) -> None:
        self._engine.shutdown()

    def _all(self, call: str, **arguments: Any) -> list[Any]:
        """Call every worker; the answers by rank.

        Raises:
            RuntimeError: what a worker raised.
        """
        self._calls += 1
        reply = self._scratch / str(self._calls)
        try:
            self._engine.collective_rpc("hybridengine", call=call, reply=str(reply), **arguments)
        except AssertionError as error:
            raise RuntimeError(str(error)) from None
        files = [Path(f"{reply}-{rank}") for rank in range(self._start.rollout.tp)]
        answers = [pickle.loads(file.read_bytes()) for file in files]
        for file in files:
            file.unlink()
        return answers


def _build(start: Start, device: SGLangDevice) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    from hybridengine.engines.rollout.sglang.worker import no_detokenizer, run_scheduler

    class Ours(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(no_detokenizer)

        @classmethod
        def _launch_scheduler_processes(cls, *arguments: Any, **options: Any) -> Any:
            device.launching()
            return super()._launch_scheduler_processes(*arguments, **options)

    rollout = start.rollout
    options: dict[str, Any] = {
        "model_path": str(start.model_path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tp_size": rollout.tp,
        "dtype": rollout.dtype,
        "context_length": start.max_model_len + _RESERVED_TOKENS,
        "max_running_requests": rollout.max_num_seqs,
        "disable_radix_cache": not rollout.prefix_caching,
        "disable_overlap_schedule": True,  # a sync must find no batch in flight
        "sleep_on_idle": True,  # an idle scheduler would take the core that the trainer needs
        "random_seed": start.seed,
        "trust_remote_code": start.trust_remote_code,
        "grammar_backend": "none",
        "log_level": "error",
    }
    options |= device.options(start)
    return Ours(**(options | rollout.engine_kwargs))
