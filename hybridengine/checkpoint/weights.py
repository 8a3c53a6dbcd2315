"""The model in a checkpoint, read by one process: parameters as the Hugging Face directory names them, float32.

Both training engines write sharded state that torch.distributed.checkpoint reads at any world size; here one process
reads one tensor at a time, so that neither the whole model nor a GPU is needed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hybridengine.engines.train.stacking import view_of
from hybridengine.placement.parts import describe_checkpoint
from hybridengine.sync.plan.layouts import Part, StoredTensor

#: What the engines put before a tensor's name.
PREFIX = "model."


class CheckpointWeights:
    """Parameters by name.

    Args:
        checkpoint: a directory ``step_00000012`` of a run.
        model_path: the model that the run started from; says what the parameters are.
        trust_remote_code: of that model.

    Raises:
        ValueError: the checkpoint lacks a parameter of the model, by name, or can't be read.
    """

    def __init__(self, checkpoint: Path, model_path: Path, *, trust_remote_code: bool = False) -> None:
        self.path = checkpoint
        self._reader = dcp.FileSystemReader(checkpoint / "engine")
        try:
            saved = self._reader.read_metadata().state_dict_metadata
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"checkpoint {checkpoint} can't be read: {type(error).__name__}: {error}") from error
        self._shapes = {
            name.removeprefix(PREFIX): tuple(entry.size)
            for name, entry in saved.items()
            if name.startswith(PREFIX) and hasattr(entry, "size")
        }
        params, stored = describe_checkpoint(model_path, trust_remote_code=trust_remote_code)
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(spec.shape) for name, spec in params.items()}
        self._places: dict[str, tuple[StoredTensor, Part]] = {
            part.param: (tensor, part) for tensor in stored if tensor.name in self._shapes for part in tensor.parts
        }
        self._last: tuple[str, Tensor] | None = None
        missing = sorted(name for name in self.shapes if name not in self._shapes and name not in self._places)
        if missing:
            raise ValueError(f"checkpoint {checkpoint} is not of the model {model_path}: it has no {missing[0]!r}")

    def __getitem__(self, name: str) -> Tensor:
        """The whole parameter, float32. Those inside one stacked tensor are read together, one after the other."""
        if name in self._places:
            tensor, part = self._places[name]
            return view_of(self._stored(tensor.name), part, self.shapes[name]).contiguous()
        return self._stored(name)

    def _stored(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            full = torch.empty(self._shapes[name], dtype=torch.float32)
            state: dict[str, Any] = {f"{PREFIX}{name}": full}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(state, storage_reader=self._reader, no_dist=True)
            self._last = name, full
        return self._last[1]
