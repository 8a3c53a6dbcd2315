"""Pages of host memory: giving them back to the system, taking them again, exchanging them for those of a file.

All of it leaves addresses alone, and acts on the whole pages inside a range: the partial ones at both ends, which the
range shares with its neighbours, stay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_MADV_REMOVE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 9, 22, 23
_MAP_FIXED = 0x10

#: Bytes from which large pages are worth asking for.
LARGE = 4 * 2**20


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """(start, length) of the whole pages in a range; length 0 where there are none."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start)


def release_pages(address: int, nbytes: int) -> int:
    """Give pages back to the system; they read as something else from then on.

    In shared memory they go for every process that maps them (MADV_REMOVE), in private memory for this one
    (MADV_DONTNEED).

    Returns:
        bytes given back.

    Raises:
        OSError: the system refuses (locked memory, huge-page mappings).
    """
    start, length = whole_pages(address, nbytes)
    if length and _madvise(start, length, _MADV_REMOVE) and (code := _madvise(start, length, mmap.MADV_DONTNEED)):
        raise OSError(code, f"{length} bytes of host memory can't be released: {os.strerror(code)}")
    return length


def leave_to_file(address: int, nbytes: int) -> None:
    """Release pages of this process whose contents are in a file: nothing is lost, and a touch brings them back.

    Raises:
        OSError: the system refuses.
    """
    start, length = whole_pages(address, nbytes)
    if length and (code := _madvise(start, length, mmap.MADV_DONTNEED)):
        raise OSError(code, f"{length} bytes of host memory can't be left to their file: {os.strerror(code)}")


def fetch_ahead(address: int, nbytes: int) -> None:
    """Start reading a file's pages from the disk; a hint."""
    start, length = whole_pages(address, nbytes)
    if length:
        _madvise(start, length, mmap.MADV_WILLNEED)


def take(address: int, nbytes: int, *, write: bool) -> None:
    """Map all pages at once instead of one at each first touch (Linux 5.14; else they come at the touch)."""
    start, length = whole_pages(address, nbytes)
    if length:
        _madvise(start, length, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def prefer_large_pages(address: int, nbytes: int) -> None:
    """Advice for when private memory is first touched; the system may not follow it."""
    start, length = whole_pages(address, nbytes)
    if length and hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(start, length, mmap.MADV_HUGEPAGE)


def exchange_for_file(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Put a file's pages in the place of a range of whole pages. The caller has written its contents to the file.

    Raises:
        OSError: the system refuses; nothing has changed then.
    """
    _map(address, nbytes, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)


def exchange_for_memory(address: int, nbytes: int) -> None:
    """Put private memory, zeros, in the place of a range of whole pages.

    Raises:
        OSError: the system refuses; nothing has changed then.
    """
    _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)


def unnamed_file(directory: Path | str, nbytes: int) -> int:
    """Descriptor of a new file of zeros that disappears with the last process that has it.

    Raises:
        OSError: no such directory, or no room; names ``memory.offload_dir``.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        allocate(file.fileno(), nbytes, directory)
        return os.dup(file.fileno())


def allocate(fd: int, nbytes: int, directory: Path | str) -> None:
    """Blocks, not only length: a full disk shows here and not at some write.

    Raises:
        OSError: no room in ``directory``; names ``memory.offload_dir``.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise OSError(
            error.errno, f"memory.offload_dir={directory}: no room for {nbytes / 2**30:.2f} GiB ({error.strerror})"
        ) from error


def shared_backings(addresses: Sequence[int]) -> dict[int, str]:
    """Those of the addresses that lie in shared mappings, with the path of the file or memfd behind each."""
    if not addresses:
        return {}
    found: dict[int, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions, _, _, _, *path = line.split(maxsplit=5)
        if permissions[3] == "s":
            first, last = (int(end, 16) for end in place.split("-"))
            found |= {address: " ".join(path) for address in addresses if first <= address < last}
    return found


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return 0 if libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


def _map(address: int, nbytes: int, flags: int, fd: int, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if found != address:
        code = ctypes.get_errno()
        raise OSError(code, f"{nbytes} bytes of memory can't be mapped at {address:#x}: {os.strerror(code)}")


def zero_by_release(storage: torch.UntypedStorage) -> None:
    """Give a private storage's pages back; it reads as zeros from then on.

    Anonymous pages come back as zeros; those at both ends, which it shares with its neighbours, are cleared.
    """
    address, size = storage.data_ptr(), storage.nbytes()
    contents = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    if release_pages(address, size):
        contents[: -address % mmap.PAGESIZE].zero_()
        contents[size - (address + size) % mmap.PAGESIZE :].zero_()
    else:
        contents.zero_()
