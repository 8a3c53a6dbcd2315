"""vLLM as a guest in the trainer's process: quiet when it comes, and leaving what is not its own when it goes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.distributed.world import World

#: Set when the first engine is built, unless the user set them: vLLM reads them at import, then and later.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, beside the trainer
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are ours to place
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def process_settings_kept(world: World) -> Iterator[None]:
    """Set ENVIRONMENT; undo what vLLM does to the rest of the process while it is built.

    Its CPU platform overwrites LOCAL_WORLD_SIZE and LD_PRELOAD, which child processes would inherit, and
    replaces ``torch.set_num_threads`` by a function that does nothing. Who this process is, it reads from the
    environment only.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.local_rank)}
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in set(os.environ) - set(before):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(before)


@contextmanager
def quiet_start() -> Iterator[None]:
    """While vLLM is imported and the engine built: hide its known remarks, and nothing else.

    ``VLLM_LOGGING_LEVEL`` must be set; it is obeyed throughout.

    - vLLM logs before it has configured its logger ("Triton is installed, but ..."), so its level is set here.
    - It looks at every attribute of every loaded module, which sets off torch's own deprecation warnings.
    - Its CPU worker binds all memory of the process, the trainer's included, to one NUMA node and warns about
      that. Placement of memory is the launcher's business (``numactl``): the call is skipped.
    """
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    operators = torch.ops._C
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op`", category=FutureWarning)
        operators.__dict__["init_cpu_memory_env"] = lambda nodes: None
        try:
            yield
        finally:
            del operators.__dict__["init_cpu_memory_env"]


@contextmanager
def process_group_kept() -> Iterator[None]:
    """While the engine shuts down: vLLM may destroy the groups it made, but not the job's default group."""
    destroy = dist.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_own
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def register_architecture(model_path: Path) -> None:
    """Name the model's class to vLLM, which otherwise starts a process of its own to look at it (seconds)."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    for architecture in json.loads((model_path / "config.json").read_text()).get("architectures") or []:
        if architecture in _TEXT_GENERATION_MODELS:
            module, name = _TEXT_GENERATION_MODELS[architecture]
            model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
            ModelRegistry.register_model(architecture, model)
