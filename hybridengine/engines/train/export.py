"""Hugging Face export: every rank writes its share of the parameters, and rank 0 what goes along.

Parameters are shared out by bytes. In turn k all ranks exchange, in one all-to-all, the slices of the k-th parameter of
each share, so a parameter is whole on the rank that writes it and nowhere else; a rank holds the parameters of one file
at most. The files appear under a temporary name, and the directory gets its own when all ranks have written theirs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.distributed.errors import agree, raise_together
from hybridengine.engines.train.batching import partition
from hybridengine.sync.plan.boxes import Box
from hybridengine.sync.plan.spec import Pattern, Piece, ShardMap
from hybridengine.sync.plan.views import view_of

#: Tensor bytes of one safetensors file at most (one larger parameter makes one larger file).
FILE_BYTES = 2 << 30

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A safetensors file: the rank that writes it and its parameters, in order."""

    name: str
    writer: int
    params: tuple[str, ...]


def export_model(
    path: Path,
    shard_map: ShardMap,
    tensors: Mapping[str, Tensor],
    *,
    config: Any,
    source: Path,
    device: torch.device,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face directory in float32. Collective over all training ranks.

    Args:
        path: replaced if it exists; appears only when complete.
        shard_map, tensors: the layout, and this rank's tensors by its names.
        config: transformers configuration; saved with dtype float32.
        source: directory whose other small files (tokenizer, chat template, generation config, custom
            code) are copied.
        device: of ``tensors``.
        changes: keys of config.json that are another than the source's.

    Raises:
        OSError: this rank could not write; PeerError on the other ranks. Nothing is left behind then.
    """
    path = Path(path)
    staging, is_main = path.with_name(f".{path.name}.tmp"), dist.get_rank() == 0
    sizes = {name: 4 * spec.numel for name, spec in shard_map.params.items()}
    files = plan_files(sizes, dist.get_world_size())
    what = f"export to {path}"
    try:
        with agree(what):
            if is_main:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
        raise_together(_write_share(staging, files, _whole_parameters(shard_map, tensors, files, device)), what)
        with agree(what):
            if is_main:
                write_rest(staging, files, sizes, config, source, changes=changes)
                _replace(staging, path)
    except Exception:
        if is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def plan_files(sizes: Mapping[str, int], writers: int = 1, limit: int | None = None) -> list[ExportFile]:
    """Every writer's files, in order, at most ``limit`` bytes each. ``sizes``: bytes by parameter.

    One file is ``model.safetensors``; several are ``model-00001-of-00002.safetensors`` and so on.
    """
    limit = FILE_BYTES if limit is None else limit
    names = list(sizes)
    groups: list[tuple[int, list[str]]] = []
    for writer, share in enumerate(partition([*sizes.values()], writers)):
        total = limit + 1  # the first parameter opens a file
        for name in (names[index] for index in share):
            if total + sizes[name] > limit:
                groups.append((writer, []))
                total = 0
            groups[-1][1].append(name)
            total += sizes[name]
    if len(groups) == 1:
        return [ExportFile("model.safetensors", groups[0][0], tuple(groups[0][1]))]
    return [
        ExportFile(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", writer, tuple(group))
        for i, (writer, group) in enumerate(groups)
    ]


def sources(pattern: Pattern, target: int) -> list[list[Piece]]:
    """By rank, the pieces it gives for ``target`` to have the whole parameter: each box once, from ``target`` itself
    where it has it, else from one of its holders, another one for another target."""
    holders: dict[Box, list[tuple[int, Piece]]] = {}
    for rank, pieces in enumerate(pattern.ranks):
        for piece in pieces:
            holders.setdefault(piece.box, []).append((rank, piece))
    found: list[list[Piece]] = [[] for _ in pattern.ranks]
    for held in holders.values():
        rank, piece = next((one for one in held if one[0] == target), held[target % len(held)])
        found[rank].append(piece)
    return found


@torch.no_grad()
def _whole_parameters(
    shard_map: ShardMap, tensors: Mapping[str, Tensor], files: Sequence[ExportFile], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """This rank's share, one parameter at a time, float32 in host memory. Collective: all ranks walk to the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = [[name for file in files if file.writer == writer for name in file.params] for writer in range(size)]
    (dtype,) = {getattr(torch, name) for name in shard_map.dtype.values()}
    known: dict[tuple[int, int], list[list[Piece]]] = {}

    def pieces_of(name: str, target: int) -> list[list[Piece]]:
        pattern = shard_map.holdings[name].pattern
        key = id(pattern), target
        if key not in known:
            known[key] = sources(pattern, target)
        return known[key]

    for turn in range(max(map(len, shares))):
        given: list[Tensor] = []
        counts = [0] * size
        for target, share in enumerate(shares):
            for name in share[turn : turn + 1]:
                for piece in pieces_of(name, target)[rank]:
                    given.append(view_of(tensors[shard_map.holdings[name].tensors[piece.slot]], piece).reshape(-1))
                    counts[target] += given[-1].numel()
        mine = shares[rank][turn : turn + 1]
        wanted = pieces_of(mine[0], rank) if mine else [[] for _ in range(size)]
        expected = [sum(prod(piece.sizes) for piece in pieces) for pieces in wanted]
        received = torch.empty(sum(expected), dtype=dtype, device=device)
        sent = torch.cat(given) if given else received.new_empty(0)
        dist.all_to_all_single(received, sent, expected, counts)
        if mine:
            yield mine[0], _assembled(shard_map.params[mine[0]].shape, [p for part in wanted for p in part], received)


def _assembled(shape: Sequence[int], pieces: Sequence[Piece], flat: Tensor) -> Tensor:
    full = torch.empty(tuple(shape), dtype=torch.float32)
    for piece, values in zip(pieces, flat.split([prod(piece.sizes) for piece in pieces]), strict=True):
        box = tuple(slice(offset, offset + size) for offset, size in zip(*piece.box, strict=True))
        full[box] = values.view(piece.sizes)
    return full


def _write_share(
    staging: Path, files: Sequence[ExportFile], parameters: Iterator[tuple[str, Tensor]]
) -> Exception | None:
    """Write each file of this rank as soon as its parameters are there, and free them. Returns what went wrong:
    the parameters are walked to the end all the same, because gathering them is collective."""
    from safetensors.torch import save_file

    ends = {file.params[-1]: file for file in files}
    pending: dict[str, Tensor] = {}
    error: Exception | None = None
    for name, full in parameters:
        if error is not None:
            continue
        pending[name] = full
        if name in ends:
            try:
                save_file(pending, staging / ends[name].name, metadata={"format": "pt"})
                _sync(staging / ends[name].name)
            except Exception as caught:  # noqa: BLE001  raised by the caller, on all ranks together
                error = caught
            pending = {}
    return error


def write_rest(
    staging: Path,
    files: Sequence[ExportFile],
    sizes: Mapping[str, int],
    config: Any,
    source: Path,
    *,
    dtype: str = "float32",
    changes: Mapping[str, Any] | None = None,
) -> None:
    """The index of several files, config.json with ``dtype``, and the small files of ``source``."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.params}
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: weight_map[name] for name in sizes},
        }
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    written = json.loads((source / "config.json").read_text())
    # The source's own file with the dtype changed: nothing that transformers would normalise gets lost.
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = dtype
    written.setdefault("architectures", config.architectures)
    written |= changes or {}
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


def classifier_keys(architectures: Sequence[str]) -> dict[str, Any]:
    """The config.json keys of a value model made from a causal language model of these architectures."""
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in architectures]
    return {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
