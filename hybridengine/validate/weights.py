"""A model directory's weight files, without their weights: what a broken download left is named by file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
#: How the stand-in for a file begins that Git LFS keeps elsewhere.
LFS_POINTER = b"version https://git-lfs"
#: Longest header that safetensors itself reads.
LONGEST_HEADER = 100_000_000


def weight_problems(path: Path) -> Iterator[str]:
    """What is wrong with the files, one sentence each, without ``model.path=`` in front."""
    expected = _index(path)
    if isinstance(expected, str):
        yield expected
        return
    names = sorted(set(expected.values())) or sorted(file.name for file in path.glob("model*.safetensors"))
    if not names:
        others = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))[:3])
        there = f"; there is {others}, which is none of a model's files" if others else ""
        yield f"no model.safetensors in it; convert the checkpoint to safetensors{there}"
    headers: dict[str, Mapping[str, Any]] = {}
    for name in names:
        header = read_header(path / name)
        if isinstance(header, str):
            yield f"{name}: {header}"
            continue
        headers[name] = header
    lost = [tensor for tensor, file in expected.items() if file in headers and tensor not in headers[file]]
    if lost:
        yield f"{expected[lost[0]]}: has no {lost[0]}, which {INDEX} says is there ({len(lost)} such tensors)"


def shape_problems(path: Path, hf_config: Any) -> Iterator[str]:
    """Tensors of another shape than config.json says, from a model on the meta device; at most three."""
    from hybridengine.engines.train.loading import build_empty

    expected = {name: tuple(param.shape) for name, param in build_empty(path).named_parameters()}
    found = 0
    for file in sorted(path.glob("model*.safetensors")):
        header = read_header(file)
        assert not isinstance(header, str)
        for name, entry in header.items():
            stored = tuple(entry["shape"])
            if name in expected and stored != expected[name] and found < 3:
                found += 1
                yield f"{file.name}: {name} has shape {list(stored)}, {list(expected[name])} by config.json"


def read_header(file: Path) -> dict[str, Mapping[str, Any]] | str:
    """Tensor -> its entry in a safetensors header (dtype, shape, data_offsets), or what is wrong with the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            begin = stream.read(len(LFS_POINTER))
            if begin == LFS_POINTER:
                return "is a Git LFS pointer, not the weights; run `git lfs pull` in the model's clone"
            if size < 8:
                return f"has {size} bytes, which is no safetensors file; download it again"
            (length,) = struct.unpack("<Q", begin[:8])
            if length > min(LONGEST_HEADER, size - 8):
                return "is no safetensors file, or cut off in its header; download it again"
            stream.seek(8)
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        return f"is named by {INDEX} and missing; download it"
    except OSError as error:
        return f"can't be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is no safetensors file: its header can't be read; download it again"
    if size != 8 + length + data:
        return f"has {size} bytes where its header says {8 + length + data}: cut off; download it again"
    return dict(header)


def _index(path: Path) -> dict[str, str] | str:
    """Tensor -> file by the index, {} where there is none, or what is wrong with it."""
    file = path / INDEX
    if not file.exists():
        return {}
    try:
        return {str(tensor): str(name) for tensor, name in json.loads(file.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} can't be read; download it again"
