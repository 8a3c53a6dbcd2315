"""How vLLM's kernels rearrange each weight after its loader has written it.

A transfer writes into the tensors that the kernels read, at the places where the loader would put each element. That
is right only where nothing was done to the tensor in between. Whether anything was is looked at when the engine is
built: before a layer's weights are processed, they are filled with words that differ from place to place, and
afterwards they are compared. Where the words only changed places, the places are learnt, by having a copy of the layer
processed with its elements' own indices for weights, and the transfer writes there. Anything else (quantized, scaled,
padded with something other than zeros, kept in tensors that are no parameters) is refused, by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridengine.engines.rollout.vllm.patches import observe_weight_processing
from hybridengine.sync.plan.boxes import contiguous_strides
from hybridengine.sync.plan.relayout import compose, rearrangement
from hybridengine.sync.plan.spec import TensorSlice

#: Integers of a weight's width, whose bits a weight can carry through whatever only moves it.
_WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(slots=True)
class _Relaid:
    """A tensor that is stored otherwise than loaded."""

    loaded: nn.Parameter  # as it was before it was processed, without memory
    boxes: tuple[TensorSlice, ...]


class WeightProcessing:
    """Records how vLLM rearranges a model's weights between loading and running."""

    def __init__(self) -> None:
        self._relaid: dict[str, _Relaid] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the construction of the engine.

        Raises:
            ValueError: a weight is stored in a form that can't be written into; names the layer.
        """
        with observe_weight_processing(self._process, self._check_derived):
            yield

    # -- while the engine is built -----------------------------------------------------------------

    def _process(self, name: str, layer: nn.Module, process: Callable[[nn.Module], None]) -> None:
        """Have ``process`` run on one layer, and find out what it does."""
        before = {key: _Stamped(key, parameter) for key, parameter in layer.named_parameters(recurse=False)}
        pristine = _copy_of(layer, {id(stamped.parameter): stamped.meta for stamped in before.values()})
        known = set(vars(layer)) | set(_tensors_of(layer))
        process(layer)
        after = dict(layer.named_parameters(recurse=False))
        path = f"{name}." if name else ""
        if gone := sorted(set(before) ^ set(after)):
            raise _refusal(f"{path}{gone[0]}", "is there only before or only after its kernel's processing")
        moved = [key for key, stamped in before.items() if not stamped.is_unchanged(after[key])]
        if moved:
            self._learn(path, pristine, process, before, after, moved)
        if made := sorted(key for key in _tensors_of(layer) if key not in known):
            raise _refusal(f"{path}{made[0]}", "is a tensor that its kernel derives from loaded weights")

    def _learn(
        self,
        path: str,
        pristine: nn.Module | Exception,
        process: Callable[[nn.Module], None],
        before: dict[str, _Stamped],
        after: dict[str, nn.Parameter],
        moved: Sequence[str],
    ) -> None:
        if isinstance(pristine, Exception):
            raise _refusal(f"{path}{moved[0]}", f"is rearranged, and a copy of its layer can't be made ({pristine})")
        for key in moved:
            if after[key].dtype != before[key].meta.dtype:
                raise _refusal(f"{path}{key}", f"is stored as {after[key].dtype}, not as {before[key].meta.dtype}")
        passes: list[dict[str, Tensor]] = []
        for dim in range(max(before[key].meta.dim() for key in moved)):
            fresh = {key: _with_indices(stamped, dim) for key, stamped in before.items()}
            clone = _copy_of(pristine, {id(stamped.meta): fresh[key] for key, stamped in before.items()})
            assert isinstance(clone, nn.Module), clone
            _process_of(clone, process)(clone)
            passes.append({key: _words(clone.get_parameter(key).data) for key in moved})
        for key in moved:
            stored, loaded = after[key].data, before[key].meta
            found = [passes[dim][key].cpu().numpy().view(_unsigned(loaded)) for dim in range(loaded.dim())]
            coordinates = [a.astype(np.int64) for a in found]
            if any(a.max(initial=0) > size for a, size in zip(coordinates, loaded.shape, strict=True)):
                raise _refusal(f"{path}{key}", "is not only rearranged: its kernel computes with it")
            try:
                boxes = rearrangement(f"{path}{key}", coordinates, stored.stride())
            except ValueError as error:
                raise _refusal(f"{path}{key}", f"is rearranged ({error})") from error
            if not before[key].is_at(after[key], boxes):
                raise _refusal(f"{path}{key}", "is rearranged differently from call to call")
            self._relaid[f"{path}{key}"] = _Relaid(loaded, boxes)

    def _check_derived(self, model: nn.Module) -> None:
        """Attention layers derive further tensors (MLA's absorbed matrices) after all weights are processed."""
        for name, layer in model.named_modules():
            for key in ("W_UV", "W_UK_T"):
                if isinstance(getattr(layer, key, None), Tensor):
                    raise _refusal(f"{name}.{key}", "is a matrix that latent attention derives from the weights")

    @property
    def rearranged(self) -> frozenset[str]:
        """Parameters of the model that are stored otherwise than loaded."""
        return frozenset(self._relaid)

    # -- when the layout is learnt -----------------------------------------------------------------

    @contextmanager
    def as_loaded(self, model: nn.Module) -> Iterator[dict[str, Tensor]]:
        """The loader sees the tensors that it knows; yields them by name. None of them has memory."""
        replaced: list[tuple[nn.Module, str, Any]] = []
        try:
            for name, relaid in self._relaid.items():
                path, _, key = name.rpartition(".")
                layer = model.get_submodule(path)
                replaced.append((layer, key, layer._parameters[key]))
                layer._parameters[key] = relaid.loaded
            yield {name: relaid.loaded.data for name, relaid in self._relaid.items()}
        finally:
            for layer, key, parameter in replaced:
                layer._parameters[key] = parameter

    def as_stored(self, slices: Sequence[TensorSlice]) -> tuple[TensorSlice, ...]:
        """Slices of tensors as the loader knows them, in the tensors that the kernels read."""
        boxes = {name: relaid.boxes for name, relaid in self._relaid.items()}
        shapes = {name: tuple(relaid.loaded.shape) for name, relaid in self._relaid.items()}
        return compose(slices, boxes, shapes)


@dataclass(slots=True)
class _Stamped:
    """A parameter filled with words that tell its places apart, and what they were."""

    name: str
    parameter: nn.Parameter
    meta: nn.Parameter = field(init=False)
    words: Tensor = field(init=False)

    def __post_init__(self) -> None:
        data = self.parameter.data
        if data.element_size() in _WORDS and data.is_floating_point():
            # Finite, and of ordinary size: whatever computes with them works, and shows.
            data.uniform_(0.5, 1.5, generator=torch.Generator(device=data.device).manual_seed(1))
        self.words = _words(data).clone()
        self.meta = _without_memory(self.parameter)

    def is_unchanged(self, now: nn.Parameter) -> bool:
        data = now.data
        same = data.shape == self.words.shape and data.element_size() == self.words.element_size()
        return same and data.dtype == self.meta.dtype and torch.equal(_words(data), self.words)

    def is_at(self, now: nn.Parameter, boxes: Sequence[TensorSlice]) -> bool:
        """Whether the words are at the places that ``boxes`` name."""
        stored, strides = _words(now.data), contiguous_strides(tuple(self.meta.shape))
        flat = self.words.contiguous()
        for box in boxes:
            start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
            here = torch.as_strided(stored, box.sizes, box.strides, stored.storage_offset() + box.start)
            if not torch.equal(here, torch.as_strided(flat, box.sizes, strides, start)):
                return False
        return True


def _refusal(what: str, why: str) -> ValueError:
    return ValueError(
        f"rollout.engine=vllm: {what} {why}, so a weight sync can't write into it; use another kernel "
        "(rollout.engine_kwargs), an unquantized model, or rollout.engine=transformers"
    )


def _copy_of(layer: nn.Module, parameters: dict[int, nn.Parameter]) -> nn.Module | Exception:
    """A copy of a layer with other parameters, by the ids of its own; or why there can't be one."""
    try:
        return copy.deepcopy(layer, dict(parameters))
    except Exception as error:  # noqa: BLE001  communicators, streams and kernels can't be copied; few layers need it
        return error


def _process_of(clone: nn.Module, process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The copy's own processing: its method object was copied with it."""
    method = getattr(clone, "quant_method", None)
    bound = getattr(type(method), "process_weights_after_loading", None)
    return (lambda layer: bound(method, layer)) if bound is not None else process


def _words(data: Tensor) -> Tensor:
    return data.view(_WORDS[data.element_size()]) if data.element_size() in _WORDS else data.view(torch.uint8)


def _unsigned(like: Tensor) -> str:
    return {2: "uint16", 4: "uint32"}[like.element_size()]


def _with_indices(stamped: _Stamped, dim: int) -> nn.Parameter:
    """The parameter, holding 1 + each element's index in one dimension as a word; zeros where it has no such one."""
    meta = stamped.meta
    data = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=stamped.parameter.device)
    words = _words(data).zero_()
    if dim < meta.dim() and meta.element_size() in _WORDS:
        numbers = torch.arange(1, meta.shape[dim] + 1, dtype=torch.int64).to(words.dtype)  # wraps as the word does
        words.copy_(numbers.to(data.device).view([-1 if d == dim else 1 for d in range(meta.dim())]))
    return _like(meta, data)


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter, loader and all, on the meta device."""
    return _like(parameter, parameter.data.to("meta"))


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """``data`` as a parameter of the same class with the same attributes."""
    made: Any = data
    made.__class__ = parameter.__class__
    made.__dict__ = parameter.__dict__.copy()
    return made


def _tensors_of(layer: nn.Module) -> set[str]:
    """Tensors that a layer holds as plain attributes, neither parameters nor buffers."""
    return {key for key, value in vars(layer).items() if isinstance(value, Tensor)}
