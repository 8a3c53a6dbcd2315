"""What is changed about SGLang from outside, each with its reason; written for SGLang 0.5.23.

On a CPU without AMX: stand-ins for two packages it imports and does not need here.

``torchvision`` (image models; PyPI's breaks beside the CPU torch) and ``sgl_kernel`` (its kernels, which need AMX or
a GPU). Anything taken from them raises when it is called. Without registered kernels SGLang runs its layers'
``forward_native``: plain weights, which is what a transfer writes into. Nothing of this is used where CUDA is.

On a GPU: its memory saver would allocate the weights so that they can't be exported to the trainer.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

#: Set in the engine's process unless the user set them.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the padded vocabulary's mask takes half a minute at TP 2
    "TOKENIZERS_PARALLELISM": "false",
}
_ABSENT = (
    "torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional",
    "torchvision.transforms.v2", "torchvision.transforms.v2.functional", "sgl_kernel",
)  # fmt: skip
#: In the environment, and imported by SGLang or what it imports because they are there: seconds, for nothing.
_HIDDEN = ("vllm", "megatron")


class InterpolationMode(Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(Enum):
    """torchvision's names."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


class _Absent(types.ModuleType):
    """A module of functions that raise."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} is not available on this CPU")

        return missing


def install_stand_ins() -> None:
    """Before the first import of sglang."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembered: transformers must not meet the stand-in
    for name in _ABSENT:
        module: Any = _Absent(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["torchvision.transforms"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules["torchvision.io"].ImageReadMode = ImageReadMode  # type: ignore[attr-defined]
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]


def weights_outside_memory_saver() -> None:
    """In a scheduler's process: the saver takes the KV cache and the graphs, the weights are ordinary memory."""
    from contextlib import nullcontext

    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.utils import torch_memory_saver_adapter

    Saver: Any = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
    region = Saver.region

    def outside(saver: Any, tag: str, *arguments: Any, **options: Any) -> Any:
        return nullcontext() if tag == GPU_MEMORY_TYPE_WEIGHTS else region(saver, tag, *arguments, **options)

    Saver.region = outside
