"""vLLM's KV cache is built once: what does not fit is said in the keys of this program, and before it breaks.

The number of blocks is fixed when the engine is built: captured graphs hold the cache's addresses, and scheduler,
block pool and attention metadata hold their number. On a GPU a sleeping cache comes back at the same addresses and the
same size or not at all; on a CPU blocks can be withheld (``vllm_blocks.py``). A longer context does not change that:
``max_model_len`` was checked against the cache at the start, and sequences that do not fit together wait or are
preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hybridengine.config import RolloutConfig

#: In the messages of vllm/v1/core/kv_cache_utils.py and vllm/v1/worker/cpu_worker.py.
_TOO_SMALL = ("No available memory for the cache blocks", "KV cache is needed")
_TOO_LARGE = "requested memory for kv"


@contextmanager
def kv_cache_errors_explained(rollout: RolloutConfig, max_model_len: int, *, is_cuda: bool) -> Iterator[None]:
    """Around the engine's start.

    Raises:
        ValueError: the KV cache cannot hold one sequence of the longest kind, or (on a CPU) is more than there is free;
            names the keys and what vLLM said.
    """
    try:
        yield
    except ValueError as error:
        if _TOO_LARGE in str(error):
            raise ValueError(
                f"rollout.kv_cache_gib={rollout.kv_cache_gib}: this machine has not got that much for every rank; "
                f"lower it (vLLM: {error})"
            ) from error
        if not any(mark in str(error) for mark in _TOO_SMALL):
            raise
        size, more = f"rollout.kv_cache_gib={rollout.kv_cache_gib}", "a larger rollout.kv_cache_gib"
        if is_cuda:
            size = f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}"
            more = "a larger rollout.gpu_memory_utilization or rollout.tp"
        raise ValueError(
            f"{size}: the KV cache that is left cannot hold one sequence of {max_model_len} tokens "
            "(rollout.max_model_len, by default data.max_prompt_tokens + rollout.max_tokens); set "
            f"{more}, or a shorter context (vLLM: {error})"
        ) from error


def check_room_to_wake(coming: Mapping[str, int], device: torch.device) -> None:
    """Refuse before vLLM has mapped half of what it needs.

    Args:
        coming: bytes by tag.

    Raises:
        torch.OutOfMemoryError: the device has less free than that.
    """
    free, total = torch.cuda.mem_get_info(device)
    if sum(coming.values()) > free:
        parts = " and ".join(f"{tag} ({nbytes / 2**30:.2f} GiB)" for tag, nbytes in coming.items())
        raise torch.OutOfMemoryError(
            f"waking {parts} of the rollout engine: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
        )
