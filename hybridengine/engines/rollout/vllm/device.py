"""What vLLM does differently by the device it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from hybridengine.config import RolloutConfig
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.aliases import AliasedParameters
from hybridengine.engines.rollout.remote.shared_weights import WeightExporter
from hybridengine.engines.rollout.vllm.capacity import CacheSize
from hybridengine.engines.rollout.vllm.sampler import SeededSampler
from hybridengine.memory.kv_plan import BlockCache

#: platform -> "module:class".
DEVICES = {
    "cpu": "hybridengine.engines.rollout.vllm.cpu:VLLMOnCpu",
    "cuda": "hybridengine.engines.rollout.vllm.cuda:VLLMOnCuda",
}


class VLLMDevice(Protocol):
    """One engine on one kind of device.

    Attributes:
        kv_blocks: what can be withheld of the KV cache, None for nothing.
        aliases: parameters that run on the trainer's memory.
        cache_size: the settings behind the KV cache's size, for messages.
    """

    kv_blocks: BlockCache | None
    aliases: AliasedParameters

    @property
    def cache_size(self) -> CacheSize: ...

    def options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        ...

    def building(self) -> AbstractContextManager[None]:
        """Around the construction of the engine."""
        ...

    def attach(self, llm: Any, runner: Any, live: Mapping[str, Tensor]) -> SeededSampler | None:
        """The engine is there; returns our sampler if it stands in for vLLM's. ``live``: its weights."""
        ...

    def weights_exported(self, exporter: WeightExporter) -> None:
        """The weights have moved to memory that another process maps as well."""
        ...

    def stepping(self) -> AbstractContextManager[Any]:
        """Around an engine step."""
        ...

    def weights_written(self) -> None:
        """An update is complete: what is derived from the weights has to be made again."""
        ...

    def nbytes(self, tag: str) -> int: ...

    def can_sleep(self, level: int) -> set[str]:
        """Tags whose memory can go at a sleep level."""
        ...

    def sleep(self, tags: set[str], *, keep_weights: bool) -> set[str]:
        """Free ``tags``; returns what went, which may be more. ``keep_weights``: they must come back as they are."""
        ...

    def wake(self, tags: set[str]) -> None:
        """Raises torch.OutOfMemoryError when there is not as much; nothing has been taken then."""
        ...


def device_for(rollout: RolloutConfig, world: World, *, exports_weights: bool) -> VLLMDevice:
    """Of the kind of device that ``world`` is on."""
    module, name = DEVICES[world.platform.name].split(":")
    made: VLLMDevice = getattr(importlib.import_module(module), name)(rollout, world, exports_weights=exports_weights)
    return made
