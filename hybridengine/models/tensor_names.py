"""Names of a checkpoint's tensors, from its files' headers."""

from __future__ import annotations

import json
from pathlib import Path


def tensor_names(path: Path) -> set[str]:
    """Of a Hugging Face directory with safetensors; empty where it has none."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    names: set[str] = set()
    for file in path.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            names |= set(handle.keys())
    return names
