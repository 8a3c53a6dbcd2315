"""Errors of vLLM's KV cache size, which is fixed when the engine is built, in terms of this program's keys.

The number of blocks is fixed when the engine is built: captured graphs hold the cache's addresses, and scheduler,
block pool and attention metadata hold their number. On a GPU a sleeping cache comes back at the same addresses and the
same size or not at all; on a CPU blocks can be withheld (``kv_blocks.py``). A longer context does not change that:
``max_model_len`` was checked against the cache at the start, and sequences that do not fit together wait or are
preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

#: In the messages of vllm/v1/core/kv_cache_utils.py, vllm/v1/worker/cpu_worker.py and vllm/v1/worker/utils.py.
_TOO_SMALL = ("No available memory for the cache blocks", "KV cache is needed")
_TOO_LARGE = ("requested memory for kv", "less than desired GPU memory utilization")


class CacheSize(NamedTuple):
    """How large a KV cache is on one kind of device: the key with its value, and what would make it larger."""

    setting: str
    larger: str


@contextmanager
def kv_cache_errors_explained(size: CacheSize, max_model_len: int) -> Iterator[None]:
    """Around the engine's start.

    Raises:
        ValueError: the KV cache cannot hold one sequence of the longest kind, or is more than there is free; names
            the keys and vLLM's own message.
    """
    try:
        yield
    except ValueError as error:
        if any(mark in str(error) for mark in _TOO_LARGE):
            raise ValueError(
                f"{size.setting}: this machine has not got that much for every rank; lower it (vLLM: {error})"
            ) from error
        if not any(mark in str(error) for mark in _TOO_SMALL):
            raise
        raise ValueError(
            f"{size.setting}: the KV cache that is left cannot hold one sequence of {max_model_len} tokens "
            "(rollout.max_model_len, by default data.max_prompt_tokens + rollout.max_tokens); set "
            f"{size.larger}, or a shorter context (vLLM: {error})"
        ) from error
