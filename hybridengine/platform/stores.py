"""Stores: the flat buffer, one per owner and reused, that holds bytes while they are offloaded.

For a GPU's memory it is page-locked host memory (platform/cuda/memory.py); for host memory a file, see mapped.py.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from hybridengine.platform.cpu.pages import allocate

#: One read or write call moves at most this much (Linux stops at 2 GiB - 4 KiB by itself).
_CALL_BYTES = 1 << 30


class Store(Protocol):
    """A flat buffer. Transfers may be asynchronous: they complete in order, at :meth:`wait`."""

    capacity: int
    allocations: int  # how often memory was taken; constant from the second offload on

    def reserve(self, nbytes: int) -> None: ...

    def put(self, offset: int, source: torch.Tensor) -> None: ...

    def get(self, offset: int, target: torch.Tensor) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class FileStore:
    """A file without a name in ``directory``: it disappears with the process, however that ends.

    Raises:
        ValueError: the directory does not exist.
    """

    def __init__(self, directory: Path | str) -> None:
        if not Path(directory).is_dir():
            raise ValueError(f"memory.offload_dir={directory}: no such directory")
        self.directory = Path(directory)
        self._file = tempfile.TemporaryFile(dir=directory)
        self.fd = self._file.fileno()
        self.capacity = self.allocations = 0

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.capacity:
            allocate(self.fd, nbytes, self.directory)
            self.capacity = nbytes
            self.allocations += 1

    def put(self, offset: int, source: torch.Tensor) -> None:
        view = _view(source)
        done = 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done : done + _CALL_BYTES], offset + done)

    def get(self, offset: int, target: torch.Tensor) -> None:
        view = _view(target)
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done : done + _CALL_BYTES]], offset + done)
            if got == 0:
                raise OSError(f"{self.directory}: the offload file is shorter than what was written to it")
            done += got

    def close(self) -> None:
        self._file.close()


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Not ``tensor.numpy()``: that would pin the storage's size for good."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def unusable(directory: Path | str) -> str | None:
    """Why a directory can't hold offloaded bytes; None where it can."""
    if not Path(directory).is_dir():
        return "no such directory; give one on a disk"
    if in_memory(directory):
        return "that is memory itself (tmpfs); give a directory on a disk"
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return f"files can't be made there ({error.strerror}); give a directory on a disk that this user may write to"
    return None


def in_memory(directory: Path | str) -> bool:
    """Whether a directory is on a file system that is itself memory (tmpfs, ramfs)."""
    path = str(Path(directory).resolve())
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, filesystem, *_ = line.split()
        if (path == mount or path.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, filesystem
    return kind in ("tmpfs", "ramfs")
