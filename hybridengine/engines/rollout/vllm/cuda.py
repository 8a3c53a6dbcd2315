"""vLLM on a GPU: its allocator can unmap its memory and map it again at the same addresses.

Allocations carry tags. ``weights`` and ``kv_cache`` come back when they are asked for; everything else ("runtime",
"cudagraph", "workspace") goes with the weights and comes back with whatever wakes first. The KV cache alone goes by
``release_kv_cache_memory`` while the scheduler is paused; the weights go only with everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.aliases import AliasedParameters
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter
from hybridengine.engines.rollout.vllm.capacity import CacheSize
from hybridengine.engines.rollout.vllm.patches import outside_the_sleeping_pool
from hybridengine.engines.rollout.vllm.sampler import SeededSampler
from hybridengine.memory.kv_plan import BlockCache
from hybridengine.memory.sleeper import tensors_in
from hybridengine.platform.storages import storage_bytes


class VLLMOnCuda:
    """See VLLMDevice."""

    kv_blocks: BlockCache | None = None  # captured graphs hold its addresses: it is mapped as a whole

    def __init__(self, rollout: RolloutConfig, world: World, *, exports_weights: bool) -> None:
        if rollout.sampler == "seeded":
            raise ValueError("rollout.sampler=seeded: its kernel is for CPUs; use auto or engine")
        self._rollout, self._world, self._exports_weights = rollout, world, exports_weights
        self._sleeps = rollout.sleep_level > 0
        # Captured graphs hold the addresses of vLLM's own memory: no parameter runs on the trainer's.
        self.aliases = AliasedParameters(None)

    @property
    def cache_size(self) -> CacheSize:
        share = f"rollout.gpu_memory_utilization={self._rollout.gpu_memory_utilization}"
        return CacheSize(share, "a larger rollout.gpu_memory_utilization or rollout.tp")

    def options(self) -> dict[str, Any]:
        rollout = self._rollout
        return {
            "enforce_eager": rollout.enforce_eager,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": self._sleeps,
            # Other kernels store experts in an order of their own; Triton's keep the loader's.
            "moe_backend": "triton",
        }

    @contextmanager
    def building(self) -> Iterator[None]:
        # CUDA IPC can't export memory that is mapped and unmapped piece by piece.
        with outside_the_sleeping_pool("weights") if self._exports_weights and self._sleeps else nullcontext():
            yield

    def attach(self, llm: Any, runner: Any, live: Mapping[str, Tensor]) -> SeededSampler | None:
        self._llm = llm
        if self._sleeps:
            kv_cache = self._allocated("kv_cache")
            weights = self._allocated() - kv_cache
            self._nbytes = {"weights": weights, "kv_cache": kv_cache}
            if self._exports_weights:
                self._nbytes["weights"] = storage_bytes(live.values())
        else:
            tensors = {"weights": list(live.values()), "kv_cache": tensors_in(runner.kv_caches)}
            self._nbytes = {tag: storage_bytes(found) for tag, found in tensors.items()}
        return None

    def weights_exported(self, exporter: WeightExporter) -> None:
        """They are exported where they are."""

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def weights_written(self) -> None:
        """The kernels read the weights themselves."""

    def nbytes(self, tag: str) -> int:
        """Of ``weights`` with everything that wakes beside them: graphs, workspace, runtime state."""
        return self._nbytes[tag]

    def can_sleep(self, level: int) -> set[str]:
        if level == 0:
            return set()
        return {"kv_cache"} if self._exports_weights else {"weights", "kv_cache"}

    def sleep(self, tags: set[str], *, keep_weights: bool) -> set[str]:
        if "weights" not in tags:
            self._clear_finished()
            self._llm.sleep(level=0)  # pauses the scheduler, frees nothing; the last wake resumes it
            self._llm.release_kv_cache_memory()
            return {"kv_cache"}
        self._llm.sleep(level=1 if keep_weights else 2)
        return {"weights", "kv_cache"}

    def _clear_finished(self) -> None:
        """vLLM's scheduler forgets finished requests with the step after their last; until then it counts as busy."""
        core = self._llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self._llm.llm_engine.step()

    def wake(self, tags: set[str]) -> None:
        self._check_room(tags)
        self._llm.wake_up(tags=sorted(tags))

    def _check_room(self, tags: set[str]) -> None:
        """Refuse before vLLM has mapped half of what it needs, which includes what wakes unasked."""
        from vllm.device_allocator import DEFERRABLE_TAGS

        coming = {
            data.tag: self._allocated(data.tag, asleep=True)
            for data in self._allocations()
            if data.is_asleep and (data.tag in tags or data.tag not in DEFERRABLE_TAGS)
        }
        self._world.platform.release_cached()
        memory = self._world.platform.memory(self._world.device)
        assert memory is not None
        if sum(coming.values()) > memory.free:
            parts = ", ".join(f"{tag} ({nbytes / 2**30:.2f} GiB)" for tag, nbytes in sorted(coming.items()))
            raise torch.OutOfMemoryError(
                f"waking the rollout engine's {parts}: {memory.free / 2**30:.2f} of "
                f"{memory.total / 2**30:.2f} GiB are free"
            )

    def _allocated(self, tag: str | None = None, *, asleep: bool | None = None) -> int:
        """Bytes of vLLM's allocations with a tag, or of all."""
        return sum(
            data.handle[1]
            for data in self._allocations()
            if (tag is None or data.tag == tag) and (asleep is None or data.is_asleep == asleep)
        )

    def _allocations(self) -> list[Any]:
        from vllm.device_allocator import get_mem_allocator_instance

        allocator: Any = get_mem_allocator_instance()
        return list(allocator.pointer_to_data.values())
