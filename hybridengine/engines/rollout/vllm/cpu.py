"""vLLM on a CPU, whose build ignores sleep and wake: memory comes and goes by our own means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.aliases import AliasedParameters
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter
from hybridengine.engines.rollout.vllm.capacity import CacheSize
from hybridengine.engines.rollout.vllm.kv_blocks import KVBlocks
from hybridengine.engines.rollout.vllm.live_weights import LiveWeights
from hybridengine.engines.rollout.vllm.patches import private_shared_memory, yield_while_waiting
from hybridengine.engines.rollout.vllm.sampler import SeededSampler
from hybridengine.memory.sleeper import Sleeper, tensors_in


class SleepingWeights(Protocol):
    """Memory of the weights: Sleeper's own, or a shared one."""

    @property
    def nbytes(self) -> int: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class VLLMOnCpu:
    """See VLLMDevice."""

    def __init__(self, rollout: RolloutConfig, world: World, *, exports_weights: bool) -> None:
        self._rollout, self._world, self._exports_weights = rollout, world, exports_weights
        self._live = LiveWeights()
        self._eager = True

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(f"rollout.kv_cache_gib={self._rollout.kv_cache_gib}", "a larger rollout.kv_cache_gib")

    def options(self) -> dict[str, Any]:
        # Eager with an explicit cache size: vLLM then skips its warm-up.
        return {"enforce_eager": True, "kv_cache_memory_bytes": int(self._rollout.kv_cache_gib * 2**30)}

    @contextmanager
    def building(self) -> Iterator[None]:
        with self._live.recording(), private_shared_memory():
            yield

    def attach(self, llm: Any, runner: Any, live: Mapping[str, Tensor]) -> SeededSampler | None:
        yield_while_waiting()
        self._live.only(runner.model.modules())
        self._eager = bool(runner.model_config.enforce_eager)
        own = Sleeper(live.values(), large_pages=True)
        self._weights: SleepingWeights = own
        self.aliases = AliasedParameters(None if self._exports_weights else own)
        self.kv_blocks: KVBlocks = KVBlocks(
            tensors_in(runner.kv_caches), llm.llm_engine.engine_core.engine_core.scheduler
        )
        if self._rollout.sampler == "engine":
            return None
        sampler = runner.sampler = SeededSampler(runner)
        return sampler

    def weights_exported(self, exporter: WeightExporter) -> None:
        self._weights = _ExportedWeights(exporter)  # what the Sleeper held is not theirs any more

    def stepping(self) -> AbstractContextManager[Any]:
        """What vLLM decorates with ``torch.compile`` runs as it is written.

        Two small functions are left of that when the model runs eagerly; compiling them takes seconds at the first
        token, and calling the compiled ones longer than running them.
        """
        return torch.compiler.set_stance("force_eager" if self._eager else "default")

    def weights_written(self) -> None:
        self._live.repack()

    def nbytes(self, tag: str) -> int:
        """Of usable blocks, and of the plain weights without their packed copies."""
        return self.kv_blocks.nbytes if tag == "kv_cache" else self._weights.nbytes

    def can_sleep(self, level: int) -> set[str]:
        """At level 1 the weights stay: host memory is where they are."""
        return [set[str](), {"kv_cache"}, {"weights", "kv_cache"}][level]

    def sleep(self, tags: set[str], *, keep_weights: bool) -> set[str]:
        if "kv_cache" in tags:
            self.kv_blocks.sleep()
        if "weights" in tags:
            self._live.drop()
            self._weights.sleep()
        return tags

    def wake(self, tags: set[str]) -> None:
        if "weights" in tags:
            self._weights.wake()
        if "kv_cache" in tags:
            self.kv_blocks.wake()


class _ExportedWeights:
    """SleepingWeights in memory that the trainer maps as well."""

    def __init__(self, exporter: WeightExporter) -> None:
        self._exporter = exporter
        self.nbytes = exporter.handle.nbytes

    def sleep(self) -> None:
        self._exporter.free()

    def wake(self) -> None:
        """Memory comes back as it is written, zeroed."""
