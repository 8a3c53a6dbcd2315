"""MappedOffload: host memory that is offloaded without a copy, because its pages belong to a file.

On a CPU, host memory is where tensors already are; what leaves has to go to a disk. With the first offload the pages
under the tensors are exchanged for those of an unnamed file. From then on, leaving means that the process lets go of
the pages: the kernel has them in its page cache, writes them to the disk in the background and takes them away when it
needs the memory. Coming back maps them again. Nothing is copied either way, and no page is zeroed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridengine.platform.cpu import pages
from hybridengine.platform.storages import as_bytes, distinct, storage_bytes
from hybridengine.platform.stores import FileStore

#: A file's large pages can be mapped as such only where place and address agree up to this. Else each 4 KiB is a fault
#: of its own and costs, on ext4, a walk over the whole large page: 40 times the memcpy.
_LARGE_PAGE = 2 << 20

#: How /proc names shared mappings that no disk is behind.
_MEMORY = ("/memfd:", "/dev/zero", "/dev/shm/", "/SYSV")


@dataclass(slots=True)
class _Place:
    """Whole pages of a storage and where they are in the file; ``offset`` None: in another file, the storage's own.

    The storage is held, so that its range is not handed out to others while its pages are a file's.
    """

    storage: torch.UntypedStorage
    address: int
    nbytes: int
    offset: int | None


class MappedOffload:
    """A Mover (see residency.py) for CPU tensors, best for those that live as long as their engine.

    Tensors that are new at an offload (such as gradients) are copied to the file once. Addresses stay, and tensors read
    right at any time: what is away comes back when it is touched. Memory shared with other processes must be a file's
    already (a Region made in the same directory); the others let go of it themselves.

    Args:
        tensors: the tensors to move, asked anew at each offload. Views of one storage count once.
        directory: where the file is made (``memory.offload_dir``).
        prepare: called before an offload looks at the tensors (so that FSDP can free its gathered weights).

    Attributes:
        store: the file.

    Raises:
        ValueError: the directory does not exist; (:meth:`offload`) memory is shared and is no file's.
        OSError: (:meth:`offload`) no room in the directory; nothing is lost and the call can be repeated.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        directory: Path | str,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.store = FileStore(directory)
        self._tensors, self._prepare = tensors, prepare
        self._places: dict[int, _Place] = {}
        # Not at exit: the memory goes with the process.
        self._finalizer = weakref.finalize(self, _restore, self._places, self.store)
        self._finalizer.atexit = False

    def nbytes(self) -> int:
        """Bytes of the tensors, wherever they are."""
        return storage_bytes(self._tensors())

    def offload(self) -> None:
        """Release the memory. What is released already is skipped."""
        if self._prepare is not None:
            self._prepare()
        self._adopt()
        for place in self._places.values():
            pages.leave_to_file(place.address, place.nbytes)

    def prefetch(self) -> None:
        """Start reading from the disk what the kernel has taken away."""
        for place in self._places.values():
            pages.fetch_ahead(place.address, place.nbytes)

    def onload(self) -> None:
        """Map the memory again, with its contents."""
        for place in self._places.values():
            pages.take(place.address, place.nbytes, write=True)

    def drop(self) -> None:
        """Release the memory; contents that have no place in the file are lost."""
        if self._prepare is not None:
            self._prepare()
        for storage in distinct(self._tensors()):
            place = self._places.get(storage.data_ptr())
            if place is None:
                pages.release_pages(storage.data_ptr(), storage.nbytes())
            else:
                pages.leave_to_file(place.address, place.nbytes)

    def close(self) -> None:
        """The tensors get private memory again, with their contents, and the file goes."""
        self._finalizer()

    # -- inside ------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Storages that are new get their places in the file; those that are gone leave it."""
        current = {storage.data_ptr(): storage for storage in distinct(self._tensors())}
        gone = [key for key, p in self._places.items() if key not in current or current[key].nbytes() < p.nbytes]
        if gone:
            _restore_places([self._places.pop(key) for key in gone], self.store)
        new = self._new_places({key: storage for key, storage in current.items() if key not in self._places})
        self.store.reserve(max((p.offset + p.nbytes for p in new.values() if p.offset is not None), default=0))
        for key, place in new.items():
            if place.offset is not None:
                self.store.put(place.offset, _bytes(place))
                pages.exchange_for_file(place.address, place.nbytes, self.store.fd, place.offset)
            self._places[key] = place

    def _new_places(self, storages: Mapping[int, torch.UntypedStorage]) -> dict[int, _Place]:
        """Places for storages that have whole pages, behind those there are."""
        ranges = {key: pages.whole_pages(key, storage.nbytes()) for key, storage in storages.items()}
        ranges = {key: (address, nbytes) for key, (address, nbytes) in ranges.items() if nbytes}
        backings = pages.shared_backings([address for address, _ in ranges.values()])
        found = {}
        end = max((p.offset + p.nbytes for p in self._places.values() if p.offset is not None), default=0)
        for key, (address, nbytes) in ranges.items():
            backing = backings.get(address)
            if backing is None:
                if nbytes >= _LARGE_PAGE:
                    end += (address - end) % _LARGE_PAGE
                found[key] = _Place(storages[key], address, nbytes, end)
                end += nbytes
            elif backing.startswith(_MEMORY):
                raise ValueError(f"memory that other processes map ({backing}) can't be left to a file in its place")
            else:
                found[key] = _Place(storages[key], address, nbytes, None)
        return found


def _restore(places: dict[int, _Place], store: FileStore) -> None:
    _restore_places(places.values(), store)
    places.clear()
    store.close()


def _restore_places(places: Iterable[_Place], store: FileStore) -> None:
    for place in places:
        if place.offset is not None:
            pages.exchange_for_memory(place.address, place.nbytes)
            if torch._C._storage_Use_Count(place.storage._cdata) > 1:  # someone else still has it
                store.get(place.offset, _bytes(place))


def _bytes(place: _Place) -> torch.Tensor:
    begin = place.address - place.storage.data_ptr()
    return as_bytes(place.storage)[begin : begin + place.nbytes]
