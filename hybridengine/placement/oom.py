"""Messages for out-of-memory errors: the phase, the owners and their sizes, and the three keys most likely to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hybridengine.config import Config
from hybridengine.distributed.errors import current_phase
from hybridengine.engines.rollout.traits import traits_of

#: Phase name -> keys by how much they free there, and the value that helps. The first part of a nested phase's
#: path that is listed counts.
KEYS: dict[str, tuple[str, ...]] = {
    "forward_backward": (
        "train.activation_checkpointing",
        "train.max_tokens_per_micro_batch",
        "train.reshard_after_forward",
        "train.logprob_chunk_tokens",
        "train.dtype",
    ),
    "old_logprobs": (
        "train.max_tokens_per_micro_batch",
        "train.logprob_chunk_tokens",
        "train.reshard_after_forward",
        "rollout.sleep_level",
    ),
    "optimizer": ("rollout.sleep_level", "train.reshard_after_forward", "rollout.gpu_memory_utilization"),
    "sync": ("memory.offload_optimizer", "sync.bucket_mib", "rollout.sleep_level", "rollout.tp", "rollout.dtype"),
    "rollout": (
        "rollout.gpu_memory_utilization",
        "memory.offload_weights",
        "memory.offload_optimizer",
        "rollout.max_num_seqs",
        "rollout.tp",
    ),
    "engine_start": ("rollout.gpu_memory_utilization", "rollout.tp", "rollout.max_model_len"),
}
ALIASES = {"reference": "old_logprobs", "validation": "rollout", "sleep": "sync"}


class OutOfMemoryError(RuntimeError):
    """A phase needed more memory than there is; the message lists what held memory and what to change."""


def keys_for(phase: str, config: Config) -> list[str]:
    """The three ``key=value`` most likely to help in a phase; those that are set that way already are left out."""
    parts = [ALIASES.get(part, part) for part in phase.split("/")]
    listed = next((KEYS[part] for part in reversed(parts) if part in KEYS), KEYS["forward_backward"])
    found = [text for key in (*listed, *KEYS["forward_backward"]) if (text := _helpful(key, config)) is not None]
    return list(dict.fromkeys(found))[:3]


def explain(
    phase: str, owners: Mapping[str, int], config: Config, *, elsewhere: Mapping[str, int] | None = None, cause: str
) -> str:
    """The message. ``owners``: bytes on the device; ``elsewhere``: bytes of those that are asleep."""
    return "\n".join([f"out of memory in phase {phase!r} ({cause})", *advice(phase, owners, config, elsewhere)])


def advice(
    phase: str, owners: Mapping[str, int], config: Config, elsewhere: Mapping[str, int] | None = None
) -> list[str]:
    """Lines: who holds what, and what to change."""
    lines = []
    held = sorted(((size, owner) for owner, size in owners.items() if size), reverse=True)
    if held:
        lines.append("  on the device: " + ", ".join(f"{owner} {size_text(size)}" for size, owner in held))
    asleep = [f"{owner} {size_text(size)}" for owner, size in (elsewhere or {}).items() if size]
    if asleep:
        lines.append("  elsewhere: " + ", ".join(asleep))
    lines.append("  most likely to help: " + ", ".join(keys_for(phase, config)))
    lines.append("  the bill for other settings: python -m hybridengine.doctor memory <the same overrides>")
    return lines


@contextmanager
def explained(
    config: Config,
    owners: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]],
    *,
    phase: Callable[[], str | None] = lambda: None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside into one that names what to change.

    Args:
        owners: bytes of each owner on the device, and elsewhere; asked only after a failure.
        phase: asked after a failure (``lambda: tracker.failed``); default, the phase running around this block.

    Raises:
        OutOfMemoryError: for torch's (CUDA and CPU) and Python's own out-of-memory errors, with them as cause.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        on_device, elsewhere = owners()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OutOfMemoryError(
            explain(phase() or current_phase(), on_device, config, elsewhere=elsewhere, cause=first)
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch.OutOfMemoryError, MemoryError, and the plain RuntimeErrors of torch's CPU allocator and of the driver."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        mark in text for mark in ("DefaultCPUAllocator", "can't allocate memory", "CUDA error: out of memory")
    )


def _helpful(key: str, config: Config) -> str | None:
    section, name = key.split(".")
    value: Any = getattr(getattr(config, section, None), name, None)
    if key == "rollout.sleep_level":
        return None if value == 2 else f"{key}=2"
    if key == "train.reshard_after_forward" and config.train.engine != "fsdp":
        return f"train.tp={2 * config.train.tp}"
    if key in ("train.activation_checkpointing", "train.reshard_after_forward"):
        return None if value is True else f"{key}=true"
    if key.startswith("memory."):
        return None if value is not False else f"{key}=true"
    if key.endswith(".dtype"):
        return None if value == "bfloat16" else f"{key}=bfloat16"
    if key == "train.max_tokens_per_micro_batch":
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        return f"{key}={max(value // 2, longest)}" if value > longest else None
    if key == "train.logprob_chunk_tokens":
        return f"{key}={value // 4}" if value >= 256 else None
    if key == "rollout.gpu_memory_utilization":
        return f"{key}={max(0.1, round(value - 0.15, 2))}"
    if key == "rollout.tp":
        return f"{key}={2 * value}" if traits_of(config.rollout.engine).tensor_parallel else None
    if key in ("rollout.max_num_seqs", "sync.bucket_mib"):
        return f"{key}={value // 2}" if value >= 16 else None
    if key == "rollout.max_model_len":
        return None if value else f"{key}={config.data.max_prompt_tokens + config.rollout.max_tokens}"
    raise AssertionError(key)


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
