"""Build the parts of one run from its Config, say what was chosen, run the loop, write the report."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.compose import ConfigError
from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World, init_process_group
from hybridengine.interrupt import Interrupt
from hybridengine.tracing import PhaseTimer

#: name -> "module:class"; imported when chosen. A new backend is one file and one line here.
TRAIN_ENGINES = {"fsdp": "hybridengine.engines.train.fsdp:FSDPEngine"}
ROLLOUT_ENGINES = {
    "vllm": "hybridengine.engines.rollout.vllm:VLLMEngine",
    "transformers": "hybridengine.engines.rollout.transformers:TransformersEngine",
}


def load_class(registry: dict[str, str], name: str) -> Any:
    module, attribute = registry[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def run(config: Config, world: World, *, started: float) -> int:
    """The whole job on this rank. Returns the exit status."""
    if not world.is_cuda:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    init_process_group(world, timeout_seconds=config.distributed.timeout_seconds)
    interrupt = Interrupt()
    try:
        trainer = assemble(config, world, interrupt, started=started)
        trainer.run()
        return 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def prepare_model(config: Config, world: World) -> Path:
    """The model directory; the embedded model is made by rank 0 when the cache has none."""
    if config.model.path != "embedded":
        return Path(config.model.path)
    from hybridengine.embedded import ensure_embedded

    with agree("preparing the embedded model"):
        if world.is_main:
            ensure_embedded()
    return ensure_embedded()


def load_tokenizer(config: Config, model_path: Path) -> Any:
    from transformers import AutoTokenizer

    path = config.model.tokenizer or model_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer={path}: no tokenizer can be loaded from it ({error})") from None
    if config.model.chat_template:
        tokenizer.chat_template = Path(config.model.chat_template).read_text()
    return tokenizer
