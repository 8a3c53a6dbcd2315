"""Our part of SGLang's scheduler processes, one per tensor-parallel rank: weights, layout, memory, single steps."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from hybridengine.engines.rollout.remote.messages import Output
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter, byte_sums
from hybridengine.engines.rollout.sglang.patches import weights_outside_memory_saver
from hybridengine.engines.rollout.sglang.sampler import SeededSampler, carry_seeds
from hybridengine.platform.cpu.pages import release_pages
from hybridengine.platform.storages import storage_bytes
from hybridengine.sync.plan.bake import bake_vllm


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Instead of SGLang's ``run_scheduler_process``: the same, with a Scheduler that answers our calls.

    ``Engine.collective_rpc("hybridengine", call=..., reply=..., **arguments)`` reaches :class:`Worker` on every rank.
    """
    from sglang.srt.managers import scheduler as module

    class Scheduler(module.Scheduler):  # type: ignore[misc, name-defined]
        def __init__(self, *inner: Any, **options: Any) -> None:
            carry_seeds()
            weights_outside_memory_saver()
            super().__init__(*inner, **options)
            self._worker = Worker(self)

        def hybridengine(self, call: str, reply: str, **inner: Any) -> None:
            answer = getattr(self._worker, call)(**inner)
            path = Path(f"{reply}-{self._worker.rank}")
            path.with_suffix(".part").write_bytes(pickle.dumps(answer))
            path.with_suffix(".part").rename(path)

    module.Scheduler = Scheduler
    module.run_scheduler_process(*arguments, **keywords)


class Worker:
    """What one scheduler process does for the host. Runs between its batches."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._scheduler = scheduler
        self._runner = scheduler.tp_worker.model_runner
        self._runner.sampler = SeededSampler()
        self.rank = int(get_parallel().tp_rank)
        self._exporter = WeightExporter(dict(self._runner.model.named_parameters()))
        self._following: dict[str, _Tracked] = {}

    # -- weights and memory ------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "weights": self._exporter.handle,
            "kv_cache": storage_bytes(self._kv_cache()),
        }

    def layout(self, params: str) -> Any:
        """``params``: file with the pickled canonical parameters."""
        live = {name: parameter.data for name, parameter in self._runner.model.named_parameters()}
        return bake_vllm(self._runner.model, pickle.loads(Path(params).read_bytes()), live)

    def finish_update(self) -> None:
        self._exporter.check()
        self.flush()

    def checksums(self) -> dict[str, int]:
        return byte_sums(dict(self._runner.model.named_parameters()))

    def sleep(self, tags: list[str]) -> None:
        self.flush()
        if "weights" in tags:
            self._exporter.free()
        if "kv_cache" in tags:
            for tensor in self._kv_cache():
                storage = tensor.untyped_storage()
                release_pages(storage.data_ptr(), storage.nbytes())

    def flush(self) -> None:
        """Drop the prefix cache. The last answers may be out before the scheduler has cleared their samples away."""
        if not self._scheduler.waiting_queue and all(request.finished() for request in self._requests()):
            self._run_one_batch()  # there is none: it clears away
        if not self._scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("the prefix cache could not be reset: requests are still running")

    def _kv_cache(self) -> list[torch.Tensor]:
        pool = self._runner.token_to_kv_pool
        buffers = [value for name, value in vars(pool).items() if name in ("k_buffer", "v_buffer", "kv_buffer")]
        return [t for buffer in buffers for t in (buffer if isinstance(buffer, list) else [buffer])]

    # -- single steps ------------------------------------------------------------------------------

    def hold(self) -> None:
        """From here on batches run in :meth:`step` only."""
        self._scheduler._engine_paused = True

    def step(self, names: list[str]) -> list[Output] | None:
        """Run one batch if all of ``names`` have arrived (None: they have not); new tokens of every sample."""
        scheduler = self._scheduler
        for request in scheduler.waiting_queue:
            self._following.setdefault(request.rid, _Tracked(request))
        if any(name not in self._following for name in names):
            return None
        self._run_one_batch()
        return self._new()

    def abort(self, names: list[str]) -> None:
        """End samples. The batch that ends them is thrown away."""
        from sglang.srt.managers.io_struct import AbortReq

        for name in names:
            self._following.pop(name, None)
            self._scheduler.abort_request(AbortReq(rid=name))
        while self._runs(set(names)):
            self._run_one_batch()

    def _runs(self, names: set[str]) -> bool:
        return any(request.rid in names and not request.finished() for request in self._requests())

    def _requests(self) -> list[Any]:
        """Those of the running batch, and of a prompts' batch that has yet to join it."""
        batches = (self._scheduler.running_batch, self._scheduler.last_batch)
        return [request for batch in batches if batch is not None for request in batch.reqs]

    def release(self) -> None:
        """End :meth:`hold`: SGLang's event loop runs batches again."""
        self._following.clear()
        self._scheduler._engine_paused = False

    def _run_one_batch(self) -> None:
        """One turn of SGLang's ``event_loop_normal``."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch

    def _new(self) -> list[Output]:
        found = [(name, followed.take(name)) for name, followed in self._following.items()]
        for name, output in found:
            if output is not None and output.reason is not None:
                del self._following[name]
        return [output for _, output in found if output is not None]


class _Tracked:
    """A request, and how many of its tokens have been reported."""

    def __init__(self, request: Any) -> None:
        self._request, self._reported = request, 0

    def take(self, name: str) -> Output | None:
        request, start = self._request, self._reported
        tokens = list(request.output_ids[start:])
        if not tokens and not request.finished():
            return None
        self._reported += len(tokens)
        logprobs = [float(value) for value in request.logprob.output_token_logprobs_val[start:]]
        return Output(name, tokens, logprobs, reason_of(request.finished_reason) if request.finished() else None)


def reason_of(finished: Any) -> str:
    """ "stop" or "length", of SGLang's reason object. Raises RuntimeError for any other."""
    kind = finished.to_json()["type"]
    if kind not in ("stop", "length"):
        raise RuntimeError(f"SGLang ended a sample because of {finished.to_json()}")
    return str(kind)


def no_detokenizer(*_: Any, **__: Any) -> None:
    """Instead of SGLang's detokenizer process, which has nothing to do where tokens are all that is asked for."""
    import signal

    from sglang.srt.utils.common import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    signal.pause()
