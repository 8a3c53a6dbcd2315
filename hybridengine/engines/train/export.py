"""Hugging Face export: safetensors shards streamed from full parameters, with everything that goes along."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridengine.distributed.errors import raise_together

#: Tensor bytes of one safetensors file at most (one larger parameter makes one larger file).
FILE_BYTES = 2 << 30

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def export_model(
    path: Path,
    parameters: Iterable[tuple[str, Tensor]],
    *,
    sizes: Mapping[str, int],
    config: Any,
    source: Path,
    is_main: bool,
) -> None:
    """Write a Hugging Face directory. Collective; rank 0 writes.

    Args:
        path: replaced if it exists; appears only when complete.
        parameters: every canonical parameter in full, one at a time, same order on all ranks.
        sizes: bytes by name, in that order.
        config: transformers configuration; saved with dtype float32.
        source: directory whose other small files (tokenizer, chat template, generation config, custom
            code) are copied.

    Raises:
        OSError: rank 0 could not write; PeerError on the other ranks.
    """
    path = Path(path)
    files = plan_files(sizes)
    staging = path.with_name(f".{path.name}.tmp")
    error: Exception | None = None
    pending: dict[str, Tensor] = {}
    if is_main:
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        except OSError as caught:
            error = caught
    # Every rank walks all parameters, whatever happens on rank 0: gathering them is collective.
    for name, full in parameters:
        if not is_main or error is not None:
            continue
        pending[name] = full.detach().cpu().contiguous()
        try:
            _flush_complete(staging, files, pending)
        except Exception as caught:  # noqa: BLE001  raised below, on all ranks together
            error = caught
    if is_main and error is None:
        try:
            _write_rest(staging, files, sizes, config, source)
            _replace(staging, path)
        except Exception as caught:  # noqa: BLE001  raised below, on all ranks together
            error = caught
    raise_together(error, f"export to {path}")


def plan_files(sizes: Mapping[str, int], limit: int | None = None) -> dict[str, list[str]]:
    """File name -> parameters, in order, at most ``limit`` bytes each.

    One file is ``model.safetensors``; several are ``model-00001-of-00002.safetensors`` and so on.
    """
    limit = FILE_BYTES if limit is None else limit
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _flush_complete(staging: Path, files: Mapping[str, list[str]], pending: dict[str, Tensor]) -> None:
    """Write the file whose parameters are all there, if any, and forget them."""
    from safetensors.torch import save_file

    for file, names in files.items():
        if names[-1] in pending:
            save_file({name: pending.pop(name) for name in names}, staging / file, metadata={"format": "pt"})
            _sync(staging / file)


def _write_rest(
    staging: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int], config: Any, source: Path
) -> None:
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    written = json.loads((source / "config.json").read_text())
    # The source's own file with the dtype changed: nothing that transformers would normalise gets lost.
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = "float32"
    written.setdefault("architectures", config.architectures)
    (staging / "config.json").write_text(json.dumps(written, indent=2))
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OWN_FILES and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, staging / file.name)


def _replace(staging: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(staging, path)
    shutil.rmtree(old, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
