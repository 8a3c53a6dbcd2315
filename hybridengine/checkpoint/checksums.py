"""Checksums of a checkpoint's files: a bit that flipped on the disk is named before anything is loaded.

CRC-32 (zlib): every burst of up to 32 bits and every two flipped bits of a file of up to 512 MiB are found for certain,
anything else but for 1 in 2**32. It is not against who means harm.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

CHUNK = 1 << 22


def files_of(directory: Path) -> list[str]:
    """Every file below ``directory``, relative, in an order that all ranks find."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def checksums(directory: Path, files: Iterable[str]) -> dict[str, list[int]]:
    """File -> [bytes, CRC-32]."""
    found = {}
    for name in files:
        size = value = 0
        with (directory / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                size, value = size + len(chunk), zlib.crc32(chunk, value)
        found[name] = [size, value]
    return found


def check_checksums(directory: Path, expected: Mapping[str, list[int]]) -> None:
    """Raise ValueError for the first file that is missing, of another size or of other content."""
    for name, (size, value) in expected.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if (now := path.stat().st_size) != size:
            raise ValueError(f"{path} has {now} bytes, {size} were written")
        if checksums(directory, [name])[name][1] != value:
            raise ValueError(f"{path} is not what was written (its CRC-32 differs): the disk or a copy changed it")
