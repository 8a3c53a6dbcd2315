"""vLLM as a guest in the trainer's process: quiet when it comes, and leaving what is not its own when it goes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


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
