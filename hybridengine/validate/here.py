"""The configuration against this machine: packages, directories, environment variables."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from hybridengine.config import Config
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.traits import runs_in_own_processes, traits_of
from hybridengine.platform.cuda.memory import expandable_segments
from hybridengine.platform.stores import unusable


def check_here(config: Config, world: World) -> Iterator[str]:
    """List what the configuration needs and this machine lacks."""
    yield from _packages(config, world)
    yield from _allocator(config, world)
    directory = config.memory.offload_dir
    if directory is not None and not world.platform.separate_memory and (problem := unusable(directory)):
        yield f"memory.offload_dir={directory}: {problem}, or leave it null"


def _packages(config: Config, world: World) -> Iterator[str]:
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        extra = world.platform.name
        yield (
            f"rollout.engine=vllm: vLLM is not installed; pip install 'hybridengine[{extra}]' (in a clone: make "
            "install), or use rollout=transformers"
        )
    if config.train.engine == "megatron":
        if importlib.util.find_spec("megatron") is None:
            yield "train.engine=megatron: megatron-core is not installed; pip install 'hybridengine[megatron]'"
        elif config.train.transformer_engine == "true" and world.platform.runs_transformer_engine:
            from hybridengine.engines.train.megatron.kernels import choose

            try:
                choose(config.train, world.platform)
            except ValueError as error:
                yield str(error)
    try:
        traits_of(config.rollout.engine).python()
    except ValueError as error:
        yield str(error)
    if config.logging.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield (
            f"logging.wandb_project={config.logging.wandb_project}: the wandb package is not installed; "
            "pip install wandb, or leave it null"
        )
    elif config.logging.wandb_project is not None and not _wandb_is_ready():
        yield (
            f"logging.wandb_project={config.logging.wandb_project}: nobody is logged in, and it would ask in mid-run; "
            "`wandb login` first, or set WANDB_MODE=offline"
        )


def _wandb_is_ready() -> bool:
    """Whether Weights & Biases has a key (in the environment, or in the netrc file that `wandb login` writes), or needs
    none."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return True
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    import netrc
    from urllib.parse import urlparse

    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        entries = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return host in entries


def _allocator(config: Config, world: World) -> Iterator[str]:
    """Expandable segments, where GPU memory is put to sleep by vLLM or exported over CUDA IPC."""
    rollout = config.rollout
    if not world.platform.separate_memory:
        return
    ways_out = []
    traits = traits_of(rollout.engine)
    if not traits.kv_cache_grows and rollout.sleep_level > 0 and config.placement.name == "colocated":
        ways_out.append("rollout.sleep_level=0")
    if world.size > 1 and config.sync.method == "pull":
        ways_out.append(f"sync.method={'collective' if config.placement.name == 'colocated' else 'broadcast'}")
    if runs_in_own_processes(rollout):  # shares its weights with the trainer
        ways_out.append("rollout=vllm" if traits.same_process is None else "rollout.process=same")
    if ways_out and (setting := expandable_segments()):
        yield (
            f"{setting}: expandable segments can't be put to sleep or exported over CUDA IPC; unset it or set "
            f"{' '.join(ways_out)}"
        )
