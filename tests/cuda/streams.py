"""CUDA streams and events without a GPU.

Either *immediate*: work is done as it is enqueued, in program order; what waits for another process's word polls it.
Or *threaded*: every stream is a thread that does its work in order and dawdles at random before each piece, so that
whatever the program has not ordered happens in some other order sooner or later. Box copies, words, torch's copies and
fills and what a test enqueues are such work; torch's other operations first let the current stream run out.

Semantics by the CUDA runtime and driver API references: a wait for an event is for its last record before the wait; a
wait for a word goes on once ``(int64)(word - value) >= 0``; a write of a word comes after the stream's earlier work.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine import native

#: What a device address of host memory is away from the host's own: the two must not be taken for each other.
SHIFT = 1 << 52
#: A word that does not come for so long never will, as far as a test is concerned.
PATIENCE = 60.0


class Stream:
    """See the module's text. ``cuda_stream``: its handle, as the driver knows it."""

    threaded = False
    one_queue = False  # the device serves all streams one after the other, as they were enqueued
    dawdle = 2e-3  # seconds at most before a piece of work
    current: Stream
    known: dict[int, Stream] = {}
    failure: BaseException | None = None  # of work on any stream: as on a device, everything fails from then on

    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = 0x5000 + len(Stream.known)
        Stream.known[self.cuda_stream] = self
        self._enqueued = self._done = 0
        first = min(Stream.known.values(), key=lambda stream: stream.cuda_stream)
        self._work: queue.SimpleQueue[tuple[Stream, Callable[[], None]]] = (
            first._work if self.one_queue and first is not self else queue.SimpleQueue()
        )
        if self.threaded and not (self.one_queue and first is not self):
            threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> None:
        if Stream.failure is not None:
            raise RuntimeError("CUDA error: an earlier launch has failed") from Stream.failure
        self._enqueued += 1
        if self.threaded:
            self._work.put((self, work))
        else:
            work()
            self._done += 1

    def _serve(self) -> None:
        while True:
            stream, work = self._work.get()
            time.sleep(random.random() ** 3 * self.dawdle)
            try:
                work()
            except BaseException as error:
                Stream.failure = error
                raise
            stream._done += 1

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        if event.reached is None:
            raise AssertionError("an event was waited for that nobody has recorded: CUDA would not wait at all")
        self.submit(event.reached.wait)

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(1e-4)

    def query(self) -> bool:
        if Stream.failure is not None:
            raise RuntimeError("CUDA error: an earlier launch has failed") from Stream.failure
        return self._done == self._enqueued


class Event:
    """See torch.cuda.Event. ``reached``: set when the last record's place in its stream is."""

    def __init__(self, *, interprocess: bool = False, enable_timing: bool = False, blocking: bool = False) -> None:
        self.interprocess, self.timing = interprocess, enable_timing
        self.reached: threading.Event | None = None
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        reached = self.reached = threading.Event()

        def reach() -> None:
            self._at = time.perf_counter()
            reached.set()

        (stream or Stream.current).submit(reach)

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing, "an event times only with enable_timing=True"
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None:
        if self.reached is not None:
            self.reached.wait()

    def query(self) -> bool:
        return self.reached is None or self.reached.is_set()


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def synchronize_all() -> None:
    for stream in list(Stream.known.values()):
        stream.synchronize()


class Driver:
    """The calls of libcuda that the program makes."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}  # page-locked host memory: address -> bytes

    def register(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.locked:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) is not None else 713  # cudaErrorHostMemoryNotRegistered

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:  # noqa: N802
        out._obj.value = 1
        return 0

    def cuMemHostGetDevicePointer_v2(self, out: Any, address: int, flags: int) -> int:  # noqa: N802
        if address not in self.locked:
            return 1
        out._obj.value = address + SHIFT
        return 0

    def _host(self, address: int) -> int:
        host = address - SHIFT
        if host % 8 or not any(start <= host and host + 8 <= start + size for start, size in self.locked.items()):
            raise AssertionError(f"{address:#x} is no word of page-locked memory: a GPU would fault")
        return host

    def cuStreamWaitValue64_v2(self, stream: int, address: int, value: int, flags: int) -> int:  # noqa: N802
        host, there = self._host(address), Stream.known[stream]
        assert flags == 0, "only CU_STREAM_WAIT_VALUE_GEQ is known here"

        def wait() -> None:
            end = time.monotonic() + PATIENCE
            while _word(host) - value < 0:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"a stream waited {PATIENCE:g} s for a word to become {value}: it is {_word(host)}"
                    )
                time.sleep(2e-5)

        there.submit(wait)
        return 0

    def cuStreamWriteValue64_v2(self, stream: int, address: int, value: int, flags: int) -> int:  # noqa: N802
        host = self._host(address)
        Stream.known[stream].submit(lambda: _write(host, value))
        return 0


def _word(address: int) -> int:
    library = native.load()
    return library.he_load(address) if library is not None else ctypes.c_int64.from_address(address).value


def _write(address: int, value: int) -> None:
    library = native.load()
    if library is not None:
        library.he_store(address, value)
    else:
        ctypes.c_int64.from_address(address).value = value


class BoxLibrary:
    """csrc/boxes.cu's two functions, by the CPU's box copy; tests/unit/test_native_cuda.py runs the kernel itself."""

    _one_at_a_time = threading.Lock()  # the CPU's sums are not added atomically

    def he_cuda_prepare(self, boxes: int, count: int, prepared: int, starts: int) -> int:
        # What is prepared is uploaded, from pageable memory: torch waits for the current stream then.
        Stream.current.synchronize()
        ctypes.memmove(prepared, boxes, count * native.BOX_DTYPE.itemsize)
        (ctypes.c_int64 * (count + 1)).from_address(starts)[:] = list(range(count + 1))
        rows = _rows(prepared, count)
        return next((1 + i for i, op in enumerate(rows["op"].tolist()) if not 0 <= op <= native.F32_TO_BF16), 0)

    def he_cuda_run_boxes(self, boxes: int, starts: int, count: int, tiles: int, sums: int | None, stream: int) -> int:
        rows = _rows(boxes, count).copy()  # freed memory is given to others in the order of the stream, on a GPU

        def work() -> None:
            size, totals = max(1, int(rows["slot"].max()) + 1), None
            if sums is not None:
                totals = np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(sums))
            with self._one_at_a_time:
                native.run_boxes(rows, totals)

        Stream.known[stream].submit(work)
        return 0


def _rows(address: int, count: int) -> Any:
    memory = (ctypes.c_uint8 * (count * native.BOX_DTYPE.itemsize)).from_address(address)
    return np.frombuffer(memory, native.BOX_DTYPE)


class InStreamOrder(TorchDispatchMode):
    """torch's operations come after what is on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_"):
            Stream.current.submit(lambda: func(*args, **(kwargs or {})))
            return args[0]
        Stream.current.synchronize()
        return func(*args, **(kwargs or {}))


def sleep(cycles: int) -> None:
    """torch.cuda._sleep: the current stream is busy for so many cycles of 1 GHz."""
    Stream.current.submit(lambda: time.sleep(cycles * 1e-9))


def use(*, threaded: bool) -> Driver:
    """All streams from here on are of this kind. Returns the driver they obey."""
    Stream.threaded, Stream.known, Stream.failure = threaded, {}, None
    Stream.current = Stream()
    name_them()
    if threaded:
        torch.Tensor.cpu = lambda self: self.clone()  # type: ignore[method-assign, assignment]
        InStreamOrder().__enter__()  # in this thread from here on, not in the streams'
    return Driver()


def name_them() -> None:
    """By torch's names."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream, cuda._sleep = Stream, Event, on, sleep
    # Every name gets a function of its own: torch's compiler looks functions up by identity.
    cuda.current_stream = lambda device=None: Stream.current
    cuda.synchronize = lambda device=None: synchronize_all()
