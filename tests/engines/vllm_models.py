"""vLLM's own model objects at any tensor-parallel rank, without an engine and without peers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class FakeGroup(SimpleNamespace):
    """Rank ``rank`` of ``size`` as vLLM's layers ask for it while they are built and loaded."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        device_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        super().__init__(
            world_size=size, rank_in_group=rank, rank=rank, local_rank=rank, ranks=list(range(size)),
            is_first_rank=True, is_last_rank=True, device_group=device_group, cpu_group=device_group,
            unique_name="fake",
        )  # fmt: skip


@contextmanager
def fake_ranks(tp: int, rank: int) -> Iterator[None]:
    """Inside, vLLM believes to be tensor-parallel rank ``rank`` of ``tp``."""
    from vllm.distributed import parallel_state

    groups = {f"_{name}": FakeGroup() for name in ("PP", "DP", "DCP", "PCP", "WORLD")}
    groups |= {"_TP": FakeGroup(tp, rank), "_EP": FakeGroup(tp, rank)}
    before = {name: getattr(parallel_state, name) for name in groups}
    try:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def build_model(
    directory: Path, config: Any, *, tp: int, dtype: str = "float32", device: str = "cpu"
) -> torch.nn.Module:
    """An unloaded vLLM model for a transformers configuration; call it inside the ranks it is meant for."""
    from vllm import ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Registering the class itself spares the subprocess that vLLM starts to inspect an architecture by name.
    module, name = _TEXT_GENERATION_MODELS[config.architectures[0]]
    ModelRegistry.register_model(
        config.architectures[0], getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    )
    config.save_pretrained(directory)
    args = EngineArgs(
        model=str(directory), load_format="dummy", skip_tokenizer_init=True, dtype=dtype, enforce_eager=True
    )
    vllm_config = args.create_engine_config()
    vllm_config.parallel_config.tensor_parallel_size = tp
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(getattr(torch, dtype)), torch.device(device):
        return initialize_model(vllm_config)
