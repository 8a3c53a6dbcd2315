"""What a checkpoint's tensors are called, and where transformers keeps each of them in its model.

Architectures with a table (:mod:`hybridengine.sync.plan.naming`) follow it. For all others transformers is asked: the
conversion that it would apply on saving (experts unstacked, blocks renamed) is run on tensors without memory, and
each result's offset and strides say which part of which tensor it is.

Persistent buffers (the constants of xIELU, a router's correction bias) are parameters that don't train: every rank
holds them whole, and they are loaded, synced, fingerprinted, saved and exported with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.boxes import Ints, contiguous_strides
from hybridengine.sync.plan.layouts import Part, StoredTensor
from hybridengine.sync.plan.naming import ARCHITECTURES, describe_model
from hybridengine.sync.plan.spec import ParamSpec

Description = tuple[dict[str, ParamSpec], list[StoredTensor]]


def describe(model: Any, source: SafetensorsSource) -> Description:
    """Canonical parameters of a transformers model, float32, and the model's own tensors that hold them.

    Args:
        model: parameters may be on the meta device.
        source: the checkpoint, whose names are the canonical ones.

    Raises:
        ValueError: the model is not as its architecture's table says, or transformers converts a tensor in a way that
            is not a cut of it.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buffers = {name: tuple(b.shape) for name, b in persistent_buffers(model).items()}
    if any(name in ARCHITECTURES for name in getattr(model.config, "architectures", None) or []):
        params, stored = describe_model(model.config, shapes)
        for name, shape in buffers.items():
            params[name] = ParamSpec(name, shape, "float32")
            stored.append(StoredTensor.plain(params[name], whole=True))
        return params, stored
    found = converted(model, shapes | buffers, source)
    params = {part.param: ParamSpec(part.param, shape, "float32") for _, parts in found for part, shape in parts}
    return params, [
        StoredTensor(name, (shapes | buffers)[name], tuple(part for part, _ in parts), whole=name in buffers)
        for name, parts in found
    ]


def converted(
    model: Any, shapes: Mapping[str, Ints], source: SafetensorsSource
) -> list[tuple[str, list[tuple[Part, Ints]]]]:
    """Of each tensor of the model, what it holds of the checkpoint: the parts with their shapes. Raises ValueError."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owner = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    parts: dict[str, list[tuple[Part, Ints]]] = {name: [] for name in state}
    with _Views():
        reverted = revert_weight_conversion(model, dict(state))
    for param, view in reverted.items():
        name = owner.get(view.untyped_storage()._cdata)
        if name is None:
            raise ValueError(
                f"model.path={source.path}: transformers computes {param!r} of {model.config.model_type} from other "
                "tensors when it saves a model, and a weight sync moves slices only"
            )
        parts[name].append((_part(param, view, shapes[name]), tuple(view.shape)))
    renamed = _renamed(model, source, state)
    return [(name, _as_in_checkpoint(name, shapes[name], held, source, renamed)) for name, held in parts.items()]


class _Views(TorchFunctionMode):
    """Inside, tensors are not copied only to lie close together: what is cut out of a tensor stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _as_in_checkpoint(
    name: str,
    shape: Ints,
    held: list[tuple[Part, Ints]],
    source: SafetensorsSource,
    renamed: Mapping[str, str],
) -> list[tuple[Part, Ints]]:
    """The parts under the names that this checkpoint has: it may be of an older form than transformers writes."""
    if all(part.param in source for part, _ in held):
        return held
    whole = Part("", (0,) * len(shape), tuple(range(len(shape))))
    for other in (name, renamed.get(name)):
        if other is not None and other in source and source.shape(other) == shape:
            return [(whole._replace(param=other), shape)]
    return held


def _renamed(model: Any, source: SafetensorsSource, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The model's name -> the checkpoint's, as transformers renames on loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    return {
        rename_source_key(name, renamings, converters, model.base_model_prefix, dict(state))[0]: name
        for name in source.names()
    }


def _part(param: str, view: Tensor, shape: Ints) -> Part:
    """Where ``view`` lies in the contiguous tensor of ``shape`` that it is a view of.

    Rows 4 to 7 of matrix 2 in a [3, 8, 5] tensor have offset 2 * 40 + 4 * 5 = 100: origin (2, 4, 0), axes (1, 2).
    """
    strides = contiguous_strides(shape)
    origin, rest = [], int(view.storage_offset())
    for stride in strides:
        place, rest = divmod(rest, stride)
        origin.append(place)
    free = list(range(len(shape)))
    axes = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        same = [axis for axis in free if strides[axis] == stride and (size == 1 or shape[axis] > 1)]
        axis = (same or [axis for axis in free if size == 1] or [-1])[-1]
        if axis < 0:
            raise ValueError(f"{param}: transformers cuts it out of a tensor of shape {shape} in a way that is no box")
        free.remove(axis)
        axes.append(axis)
    return Part(param, tuple(origin), tuple(axes))


def tied_heads(model: Any, source: SafetensorsSource) -> Iterator[tuple[str, str]]:
    """Output projections that config.json ties and the checkpoint has as well: (name, the name it is tied to)."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None or head.weight is not table.weight:
        return
    names = {id(module): name for name, module in model.named_modules()}
    head_name, table_name = f"{names[id(head)]}.weight", f"{names[id(table)]}.weight"
    if head_name in source and table_name in source:
        yield head_name, table_name
