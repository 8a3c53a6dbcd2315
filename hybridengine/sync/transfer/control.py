"""The control page: a few words in shared memory by which ranks on one node follow each other's progress.

One page per writer, mapped by every reader. All words only grow, so a reader that polls never misses a step:

    writer:  publish(generation)     my weights are final and stay untouched until everybody is done
    reader:  wait(generation), read, done(generation) on its own page
    writer:  wait until all are done; now the memory may change again
    either:  abort(generation)       this generation will not come: waiters raise instead of waiting
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from hybridengine import native
from hybridengine.distributed.errors import PeerLostError
from hybridengine.sync.transfer.base import StaleGenerationError

PAGE_BYTES = 64 * 1024
_MAGIC = 0x4859_4252_4944_0001
_LINE = 8  # words per cache line: words that different ranks write do not share one
_WRITER = {"magic": 0, "generation": 1, "version": 2, "aborted": 3, "filled": 4, "done": 5, "ready": 6}
_READER = {"drained": 0}
MAX_READERS = PAGE_BYTES // 8 // _LINE - 1


class ControlPage:
    """Typed access to one page at the start of ``memory``; ``readers`` ranks may write their own words into it."""

    def __init__(self, memory: mmap.mmap, *, readers: int, create: bool = False) -> None:
        if readers > MAX_READERS:
            raise ValueError(f"a control page serves at most {MAX_READERS} readers, not {readers}")
        self._memory, self.readers = memory, readers  # held: the page must not be unmapped while it is used
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if create:
            self.set("magic", _MAGIC)
        elif self.get("magic") != _MAGIC:
            raise StaleGenerationError("the mapped memory is not a control page of this version")

    def get(self, word: str, reader: int | None = None) -> int:
        return _load(self._place(word, reader))

    def set(self, word: str, value: int, reader: int | None = None) -> None:
        _store(self._place(word, reader), value)

    def word(self, name: str, reader: int | None = None) -> Word:
        return Word(self, self._place(name, reader))

    def _place(self, word: str, reader: int | None) -> int:
        if reader is None:
            return self._address + 8 * _WRITER[word]
        if not 0 <= reader < self.readers:
            raise ValueError(f"reader {reader} is not in [0, {self.readers})")
        return self._address + 8 * (_LINE * (1 + reader) + _READER[word])

    @property
    def address(self) -> int:
        """Of its first byte; it is PAGE_BYTES long."""
        return self._address

    def publish(self, generation: int, version: int) -> None:
        """The writer's memory holds policy ``version``, complete; it is generation ``generation``."""
        self.set("version", version)
        self.set("generation", generation)

    def abort(self, generation: int) -> None:
        self.set("aborted", generation)

    def is_published(self, generation: int, version: int) -> bool:
        """Whether ``generation`` is there. Raises StaleGenerationError if it never will be as expected."""
        published = self.get("generation")
        if published < generation:
            return False
        held = self.get("version")
        if published > generation or held != version:
            raise StaleGenerationError(
                f"publishes generation {published} (policy version {held}), this rank expects generation "
                f"{generation} (policy version {version})"
            )
        return True


class Word(NamedTuple):
    """One word of a page, which it keeps mapped."""

    page: ControlPage
    address: int

    def get(self) -> int:
        return _load(self.address)

    def set(self, value: int) -> None:
        _store(self.address, value)


class Waiter:
    """Polls the peers' pages with a deadline, and notices a peer that died or gave up.

    Args:
        pages: control page of every other rank.
        alive: whether a rank's process still exists.
        timeout_seconds: longest wait for one condition.
    """

    def __init__(self, pages: Mapping[int, ControlPage], alive: Callable[[int], bool], timeout_seconds: float) -> None:
        self._pages, self._alive, self._timeout = pages, alive, timeout_seconds
        self.seconds = 0.0  # spent waiting in total

    def published(self, rank: int, generation: int, version: int) -> None:
        """Return once ``rank`` has published ``generation`` holding policy ``version``.

        Raises:
            StaleGenerationError: it is already past that, or holds another policy version.
            PeerLostError: see :meth:`until`.
        """
        page = self._pages[rank]

        def ready() -> bool:
            try:
                return page.is_published(generation, version)
            except StaleGenerationError as error:
                raise StaleGenerationError(f"rank {rank} {error}") from None

        self.until(ready, ranks=[rank], generation=generation, what="publish its weights")

    def all_done(self, generation: int) -> None:
        """Return once every other rank is done reading ``generation``, or has given it up."""
        for rank, page in self._pages.items():

            def done(page: ControlPage = page) -> bool:
                return page.get("done") >= generation or page.get("aborted") >= generation

            self.until(done, ranks=[rank], generation=generation, what="acknowledge the weights")

    def until(self, ready: Callable[[], bool], *, ranks: Collection[int], generation: int, what: str) -> None:
        """Return once ``ready()`` is true, which is the work of ``ranks``.

        Raises:
            PeerLostError: one of them died, gave the generation up, or the deadline passed.
        """
        begin = time.perf_counter()
        pause, looked = 0.0, begin
        try:
            while not ready():
                for rank in ranks:
                    # It may have done its part just before (or giving up is its part): look once more.
                    if self._pages[rank].get("aborted") >= generation and not ready():
                        raise PeerLostError(f"rank {rank} gave up this weight sync before it could {what}")
                now = time.perf_counter()
                if now - looked > 0.02:
                    looked = now
                    lost = [rank for rank in ranks if not self._alive(rank)]
                    # It may have done its part and then exited: look once more before calling it lost.
                    if lost and not ready():
                        raise PeerLostError(f"rank {lost[0]} died before it could {what}")
                if now - begin > self._timeout:
                    raise PeerLostError(f"rank {min(ranks)} did not {what} within {self._timeout:g} s")
                time.sleep(pause)
                pause = min(1e-3, pause + 2e-6)
        finally:
            self.seconds += time.perf_counter() - begin


def _load(address: int) -> int:
    library = native.load()
    if library is not None:
        return library.he_load(address)
    return ctypes.c_int64.from_address(address).value


def _store(address: int, value: int) -> None:
    library = native.load()
    if library is not None:
        library.he_store(address, value)
    else:
        ctypes.c_int64.from_address(address).value = value
