"""Words of host memory that streams wait for and write: ranks on one node follow each other's kernels by them.

A stream that waits occupies no multiprocessor and no host thread. Everything is enqueued; the host looks on.

Driver calls, by the CUDA driver API's reference, "Stream memory operations": ``cuStreamWaitValue64`` with
``CU_STREAM_WAIT_VALUE_GEQ`` goes on once the word is at least the value (as a signed difference, so that it may wrap);
``cuStreamWriteValue64`` is preceded by a memory barrier for the whole system, so whoever sees the word sees what the
stream's earlier kernels have written.
"""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch

_GEQ = 0
_HAS_64_BIT = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_PORTABLE, _MAPPED = 1, 2


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda, with the calls that are used here declared."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue64_v2", "cuStreamWriteValue64_v2"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    library.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]
    library.cuDeviceGetAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
    return library


def supported(device: torch.device) -> bool:
    """Whether the driver can do this for ``device``."""
    # The driver numbers the devices that this process may see, as torch does.
    has = ctypes.c_int()
    _check(driver().cuDeviceGetAttribute(ctypes.byref(has), _HAS_64_BIT, device.index or 0), "cuDeviceGetAttribute")
    return bool(has.value)


class HostWords:
    """Host memory of this process as its GPU sees it: page-locked from here to :meth:`close`, or to its own end.

    Args:
        owner: what keeps the memory mapped; held until it is unlocked.
        address, nbytes: whole pages.

    Raises:
        RuntimeError: the driver refuses, with its code.
    """

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._host = address
        _check(int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)), "cudaHostRegister")
        # Memory that is unmapped while it is locked can't be locked when the address is mapped again.
        self._unlock = weakref.finalize(self, _unlock, address, owner)
        self._unlock.atexit = False
        seen = ctypes.c_uint64()
        _check(driver().cuMemHostGetDevicePointer_v2(ctypes.byref(seen), address, 0), "cuMemHostGetDevicePointer")
        self._device = seen.value

    def wait_at_least(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """What is enqueued on ``stream`` from here on runs once the word at host ``address`` is ``value`` or more."""
        there = self._device + address - self._host
        _check(driver().cuStreamWaitValue64_v2(stream.cuda_stream, there, value, _GEQ), "cuStreamWaitValue64")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """The word becomes ``value`` when everything that is on ``stream`` is done, its writes included."""
        there = self._device + address - self._host
        _check(driver().cuStreamWriteValue64_v2(stream.cuda_stream, there, value, 0), "cuStreamWriteValue64")

    def close(self) -> None:
        self._unlock()


def _unlock(address: int, owner: object) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
