"""Import megatron-core, with the changes that it needs on a machine without CUDA.

Megatron asks ``torch.cuda`` for the current device, makes small tensors on "cuda" and looks at type names such as
"torch.cuda.FloatTensor". Here the name ``torch`` *inside megatron's modules* is replaced by a stand-in that answers
"cpu"; torch itself stays as it is for everybody else in the process (vLLM, transformers). Where CUDA is present
nothing is replaced.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.token_dispatcher",
)
_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "ones_like", "empty_like")
_CUDA_TYPES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


def prepare() -> None:
    """Import megatron-core, ready for this machine's device. Idempotent.

    Raises:
        ImportError: megatron-core is not installed; the message says how to install it.
    """
    try:
        with _plain_import() if not torch.cuda.is_available() else nullcontext():
            for name in _MODULES:
                importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        raise ImportError(
            "train.engine=megatron needs megatron-core: pip install 'hybridengine[megatron]', or train=fsdp"
        ) from error
    # Megatron's advice about other configurations, and its use of two names that torch is about to rename.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch.distributed.\w+_tensor` is deprecated")
    # Wherever they can be imported, and whatever layers are built, megatron takes from Transformer Engine (or apex) an
    # Adam whose state is laid out otherwise, and for routers a product that is TF32 in float32 (without Transformer
    # Engine, a name that nothing defines). Both stay torch's.
    sys.modules["megatron.core.optimizer"].__dict__["USING_PYTORCH_OPTIMIZER"] = True
    sys.modules["megatron.core.transformer.moe.moe_utils"].__dict__["te_general_gemm"] = None
    if not torch.cuda.is_available():
        _patch()


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Inside, ``tensor.type()`` of CPU tensors answers as a GPU's would: megatron's optimizer sorts parameters by it
    when it is built. On CUDA this does nothing."""
    if torch.cuda.is_available():
        yield
        return
    plain = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensor, *args, **kwargs)
        return _CUDA_TYPES.get(found, found) if not args and not kwargs else found

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = plain  # type: ignore[method-assign]


@contextmanager
def cuda_is_identity() -> Iterator[None]:
    """Inside, ``tensor.cuda()`` gives the CPU tensor itself: building a tied model over stages calls it."""
    if torch.cuda.is_available():
        yield
        return
    plain = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = plain  # type: ignore[method-assign]


# -- inside ------------------------------------------------------------------------------------------


@contextmanager
def _plain_import() -> Iterator[None]:
    """Functions that megatron would hand to torch.compile stay Python: on a CPU compiling costs minutes."""
    compile_ = torch.compile
    torch.compile = lambda fn=None, *args, **kwargs: fn if fn is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Apex is not installed" and the like, one per module
            yield
    finally:
        torch.compile = compile_


class _Stream:
    """Work on a CPU is in order by itself."""

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self


_STREAM = _Stream()


class _Cuda(types.ModuleType):
    """``torch.cuda`` as megatron sees it."""

    Stream = Event = staticmethod(lambda *args, **kwargs: _STREAM)
    current_device = staticmethod(lambda: _CPU)
    current_stream = default_stream = staticmethod(lambda *args: _STREAM)
    synchronize = staticmethod(lambda *args: None)
    stream = staticmethod(lambda stream: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(types.ModuleType):
    """``torch`` as megatron sees it: factories put what was meant for the GPU on the CPU."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _FACTORIES:

            def on_cpu(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
                    kwargs["device"] = _CPU
                return value(*args, **kwargs)

            self.__dict__[name] = on_cpu
            return on_cpu
        if name == "device":
            return _device
        return value


def _device(kind: Any, *args: Any) -> torch.device:
    return _CPU if str(kind).startswith("cuda") else torch.device(kind, *args)


_TORCH = _Torch("torch")


def _patch() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = _TORCH
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.__dict__["maybe_move_tensor_to_cpu"] = _splits
    mappings = sys.modules["megatron.core.tensor_parallel.mappings"].__dict__
    if not hasattr(mappings["_gather_along_first_dim"], "padded"):
        mappings["_gather_along_first_dim"] = _padded_gather(mappings["_gather_along_first_dim"])
        mappings["_reduce_scatter_along_first_dim"] = _padded_scatter(mappings["_reduce_scatter_along_first_dim"])


def _splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's ``maybe_move_tensor_to_cpu``, which converts what it has to move only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


# gloo gathers and scatters equal parts only. Experts that are cut by tensor parallelism exchange as many rows as each
# rank happens to have, so those parts travel padded to the longest.


def _padded_gather(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even(x, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        found = even(_lengthen(x, max(sizes)), group)
        return torch.cat([part[:size] for part, size in zip(found.split(max(sizes)), sizes, strict=True)])

    gather.padded = True  # type: ignore[attr-defined]
    return gather


def _padded_scatter(even: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even(x, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        parts = [_lengthen(part, max(sizes)) for part in x.split(sizes)]
        return even(torch.cat(parts), group)[: sizes[group.rank()]]

    return scatter


def _lengthen(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) if len(x) < rows else x
