"""Keys left at ``auto`` whose value follows from the model: settled before anything else looks at them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridengine.config import Config


def resolve(config: Config) -> Config:
    """``rollout.process=auto`` for models that vLLM serves through its Transformers backend: ``separate``.

    That backend rewrites the decoder's class for the whole process, so that the trainer beside it could not run. Where
    the processes are of the rollout's own anyway (``placement=disaggregated``), nothing has to change.
    """
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.process != "auto" or not served_by_transformers(config):
        return config
    return replace(config, rollout=replace(rollout, process="separate"))


def served_by_transformers(config: Config) -> bool:
    """Whether vLLM runs transformers' own code for this model."""
    from hybridengine.engines.rollout.vllm.architectures import rewrites_transformers

    return config.rollout.engine == "vllm" and rewrites_transformers(architectures_of(config.model.path))


def architectures_of(model_path: str) -> list[str]:
    """``architectures`` of a directory's config.json; empty where there is none to read."""
    try:
        content: Any = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return []
    found = content.get("architectures") if isinstance(content, dict) else None
    return [str(name) for name in found or []]
