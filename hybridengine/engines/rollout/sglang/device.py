"""What SGLang does differently by the device it runs on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridengine.engines.rollout.remote.messages import Start
from hybridengine.engines.rollout.sglang import patches


class SGLangDevice(Protocol):
    """One engine on one kind of device."""

    def prepare(self) -> None:
        """Before the first import of sglang."""
        ...

    def options(self, start: Start) -> dict[str, Any]:
        """Arguments of ``sglang.Engine``."""
        ...

    def launching(self) -> None:
        """Right before SGLang starts its scheduler processes, when it has made its own settings."""
        ...

    def sleep(self, engine: Any, workers: Callable[..., list[Any]], tags: Sequence[str]) -> None:
        """Free ``tags``. ``workers``: calls a method of every worker."""
        ...

    def wake(self, engine: Any, tags: Sequence[str]) -> None: ...


class SGLangOnCpu:
    """See SGLangDevice. The workers give pages back themselves; they come back as they are written."""

    def prepare(self) -> None:
        for name, value in patches.ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        patches.install_stand_ins()

    def options(self, start: Start) -> dict[str, Any]:
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "max_total_tokens": _cache_tokens(start),
        }

    def launching(self) -> None:
        import multiprocessing

        multiprocessing.set_start_method("fork", force=True)  # children that have everything imported already

    def sleep(self, engine: Any, workers: Callable[..., list[Any]], tags: Sequence[str]) -> None:
        workers("sleep", tags=list(tags))

    def wake(self, engine: Any, tags: Sequence[str]) -> None:
        """Memory comes back as it is written."""


class SGLangOnCuda:
    """See SGLangDevice: SGLang's own memory saver takes the KV cache and the captured graphs away.

    The weights stay: the trainer has them mapped over CUDA IPC, which can't export memory of the saver. So they are
    allocated outside of it (patches.weights_outside_memory_saver).
    """

    def prepare(self) -> None:
        """Its packages are all there."""

    def options(self, start: Start) -> dict[str, Any]:
        rollout = start.rollout
        return {
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "disable_cuda_graph": rollout.enforce_eager,
            "sampling_backend": "pytorch",
            "enable_memory_saver": rollout.sleep_level > 0,
        }

    def launching(self) -> None:
        """They are spawned, as CUDA wants it."""

    def sleep(self, engine: Any, workers: Callable[..., list[Any]], tags: Sequence[str]) -> None:
        assert list(tags) == ["kv_cache"], tags
        workers("flush")  # it must find the engine idle
        engine.release_memory_occupation(tags=["kv_cache", "cuda_graph"])

    def wake(self, engine: Any, tags: Sequence[str]) -> None:
        assert list(tags) == ["kv_cache"], tags
        engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])


DEVICES: dict[str, type[SGLangDevice]] = {"cpu": SGLangOnCpu, "cuda": SGLangOnCuda}


def _cache_tokens(start: Start) -> int:
    """Tokens of KV cache per rank that fit ``rollout.kv_cache_gib``."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(start.model_path, trust_remote_code=start.trust_remote_code)
    heads = config.num_attention_heads
    kv_heads = max(1, (getattr(config, "num_key_value_heads", None) or heads) // start.rollout.tp)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_token = 2 * config.num_hidden_layers * kv_heads * head_dim * getattr(torch, start.rollout.dtype).itemsize
    return int(start.rollout.kv_cache_gib * 2**30) // per_token
