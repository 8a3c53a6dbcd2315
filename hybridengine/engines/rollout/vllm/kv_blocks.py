"""The KV cache of vLLM on a CPU: it sleeps, and blocks of it can be kept from the scheduler.

The tensors keep the size they were built with, and every block its number. Memory is taken page by page as blocks are
first used after a wake, so a block that is never handed out takes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hybridengine.memory.sleeper import Sleeper


class KVBlocks(Sleeper):
    """See Sleeper and BlockCache.

    Args:
        tensors: of all layers.
        scheduler: vLLM's, in this process. Its pool keeps one of the blocks as a placeholder, which no sequence gets.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], scheduler: Any) -> None:
        super().__init__(tensors)
        self._pool = scheduler.kv_cache_manager.block_pool
        self.total = self.usable = self._pool.num_gpu_blocks
        self.minimum = 1 + sum(
            -(-group.kv_cache_spec.max_memory_usage_bytes(scheduler.vllm_config) // group.kv_cache_spec.page_size_bytes)
            for group in scheduler.kv_cache_config.kv_cache_groups
        )
        self.block_bytes = -(-super().nbytes // self.total)
        self.planned = False

    @property
    def nbytes(self) -> int:
        """Of the usable blocks."""
        return self.usable * self.block_bytes

    def sleep(self) -> None:
        super().sleep()
        self.planned = False

    def allow(self, count: int) -> None:
        """Blocks numbered ``count`` and above are not handed out until they are allowed again.

        The pool hands out what is in its free queue, and takes its cache for unused when all blocks that it counts but
        the placeholder are there. Sequences that need more wait or are preempted and recomputed, as ever.

        Raises:
            RuntimeError: requests hold blocks.
        """
        if count != self.usable:
            from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

            pool = self._pool
            if not pool.reset_prefix_cache():
                raise RuntimeError("the KV cache can't be planned while requests are running")
            pool.free_block_queue = FreeKVCacheBlockQueue([b for b in pool.blocks[:count] if not b.is_null])
            pool.num_gpu_blocks = self.usable = count
        self.planned = True
