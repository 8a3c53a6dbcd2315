"""A model without memory, and its weights by name from safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.naming import SCORE


class ValueSource(SafetensorsSource):
    """The checkpoint of a value model: ``score.weight`` [1, H], zeros where the checkpoint has none.

    Args:
        width: H.
        required: it has to have one.

    Raises:
        ValueError: a head of several labels, or none where it is required.
    """

    def __init__(self, path: Path, width: int, *, required: bool = False) -> None:
        super().__init__(path)
        self._zeros = None if super().__contains__(SCORE) else torch.zeros(1, width)
        if self._zeros is not None and required:
            raise ValueError(f"{path}: no {SCORE} in it; a reward model is a sequence classifier with a trained head")
        if self._zeros is None and super().shape(SCORE) != (1, width):
            raise ValueError(
                f"{path}: {SCORE} has shape {super().shape(SCORE)}; a value or reward model has one label, (1, {width})"
            )

    def __contains__(self, name: str) -> bool:
        return name == SCORE or super().__contains__(name)

    def __getitem__(self, name: str) -> Tensor:
        return self._zeros if name == SCORE and self._zeros is not None else super().__getitem__(name)

    def names(self) -> list[str]:
        found = [name for name in super().names() if name != "lm_head.weight"]
        return found if SCORE in found else [*found, SCORE]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._zeros.shape) if name == SCORE and self._zeros is not None else super().shape(name)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if name == SCORE and self._zeros is not None:
            return torch.zeros(tuple(sizes))
        return super().read(name, offsets, sizes)

    def dtype(self, name: str) -> str:
        return "float32" if name == SCORE and self._zeros is not None else super().dtype(name)


def build_empty(path: Path, *, trust_remote_code: bool = False, values: bool = False) -> Any:
    """The causal language model of ``path`` with float32 parameters on the meta device and real buffers.

    ``values``: its sequence classifier with one label instead.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if not (path / "config.json").exists():
        raise ValueError(f"model.path={path}: no config.json there; it must be a Hugging Face model directory")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if values:
        config.num_labels = 1
    with _parameters_on_meta():
        model = (AutoModelForSequenceClassification if values else AutoModelForCausalLM).from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
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


@torch.no_grad()
def load_buffers(buffers: Mapping[str, Tensor], source: ParameterSource) -> None:
    """Fill persistent buffers from the checkpoint, where it has them; else they stay as the model was built, as in
    transformers.

    Raises:
        ValueError: the checkpoint's shape differs from the model's.
    """
    for name, buffer in buffers.items():
        if name in source:
            tensor = source[name]
            if tensor.shape != buffer.shape:
                raise ValueError(
                    f"model.path={source.path}: {name} has shape {tuple(tensor.shape)} in the checkpoint, "
                    f"{tuple(buffer.shape)} by config.json"
                )
            buffer.copy_(tensor)


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
