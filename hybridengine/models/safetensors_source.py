"""The tensors of a model directory by name, read from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor


class SafetensorsSource:
    """Reads single tensors of a Hugging Face directory. Files are mapped, so peers share the page cache.

    Raises:
        ValueError: no safetensors file, or one that the index names is missing.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
        files = [path / name for name in names] or sorted(path.glob("model*.safetensors"))
        if not files:
            raise ValueError(f"model.path={path}: no model.safetensors there; training engines read safetensors only")
        for file in files:
            if not file.exists():
                raise ValueError(f"model.path={path}: {file.name} is named by the index but missing")
            handle = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118  not a dict
                self._files[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        return self._checked(name, self._files[name].get_tensor(name))

    def names(self) -> list[str]:
        """Every tensor stored, in no particular order."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """One box of a tensor; only its own bytes are read."""
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return self._checked(name, self._files[name].get_slice(name)[box])

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        """Raise ValueError for weights that are NaN: nothing that is computed from them would be a number."""
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and bool(tensor.isnan().any()):
            raise ValueError(f"model.path={self.path}: {name} holds NaN; the checkpoint is broken")
        return tensor

    def dtype(self, name: str) -> str:
        """torch's name of the stored dtype, such as "bfloat16"."""
        stored = self._files[name].get_slice(name)
        tensor = stored[:0] if stored.get_shape() else self[name]
        return str(tensor.dtype).removeprefix("torch.")
