"""A model without memory, and its weights by name from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


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
        return str(self._files[name].get_slice(name)[:0].dtype).removeprefix("torch.")


def build_empty(path: Path, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of ``path`` with float32 parameters on the meta device and real buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (path / "config.json").exists():
        raise ValueError(f"model.path={path}: no config.json there; it must be a Hugging Face model directory")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # It would drop the pad token's gradient, also where that token is real input (as in models that pad with
            # their end token). Padding itself has no gradient: nothing attends to it and nothing is predicted there.
            module.padding_idx = None
    return model


class ParameterSource(Protocol):
    """Where a model's parameters are read from, by the model's names."""

    @property
    def path(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def __getitem__(self, name: str) -> Tensor: ...


def check_names(model: nn.Module, source: ParameterSource) -> None:
    """Every parameter must be in the checkpoint.

    Raises:
        ValueError: naming those that are not.
    """
    missing = [name for name, _ in model.named_parameters() if name not in source]
    if missing:
        raise ValueError(
            f"model.path={source.path}: {len(missing)} parameters are not in the checkpoint, or not under the names "
            f"that are known for {type(model).__name__}, first: {missing[0]}"
        )


def materialise(module: nn.Module, names: dict[int, str], source: ParameterSource) -> None:
    """Replace the meta parameters of ``module`` by float32 CPU tensors read from ``source``.

    Args:
        names: canonical name by ``id`` of the meta parameter. A parameter shared by several places inside
            ``module`` (tied embeddings) stays shared.

    Raises:
        ValueError: the checkpoint's shape differs from the model's.
    """
    loaded: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for key, param in child._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in loaded:
                name = names[id(param)]
                tensor = source[name]
                if tensor.shape != param.shape:
                    raise ValueError(
                        f"model.path={source.path}: {name} has shape {tuple(tensor.shape)} in the checkpoint, "
                        f"{tuple(param.shape)} by config.json"
                    )
                loaded[id(param)] = nn.Parameter(tensor.to(torch.float32), requires_grad=param.requires_grad)
            child._parameters[key] = loaded[id(param)]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside have no memory; buffers do (rotary tables are in no checkpoint)."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is already there is being tied: it must stay the same object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
