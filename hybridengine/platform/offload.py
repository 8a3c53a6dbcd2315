"""FlatOffload: move the contents of a set of tensors out of device memory and back, in place.

Tensor objects stay what they are, so every view of them (optimizer parameters, FSDP's flat shards) is valid
afterwards. On a GPU their storages shrink to nothing and grow again, perhaps elsewhere. Host memory can be dropped
only; platform/cpu/mapped.py keeps its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hybridengine import platform
from hybridengine.platform import StoragePool
from hybridengine.platform.storages import as_bytes, distinct, storage_bytes
from hybridengine.platform.stores import Store

#: Of places in the flat buffer: fine for every copy engine, and for O_DIRECT should it come to that.
ALIGNMENT = 512


@dataclass(slots=True)
class _Piece:
    """One storage and its place in the store. ``saved``: the store has its bytes. ``away``: its memory is gone."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    saved: bool = False
    away: bool = False


class FlatOffload:
    """A Mover (see residency.py) for whatever tensors ``tensors()`` names at the moment of an offload.

    Bit-equal after any order of calls, including after calls that failed half-way: each piece of memory is
    released only once its bytes are in the store, and forgotten in the store only once they are back.

    Args:
        tensors: the tensors to move, asked anew at each offload (gradients come and go). Views of one storage
            count once; empty ones are skipped. All on one device.
        store: where contents wait, or what makes one for a device; None: they can't be kept, only dropped.
        prepare: called before an offload looks at the tensors (so that FSDP can free its gathered weights).

    Raises (by the methods):
        ValueError: CPU tensors are to be offloaded: without a directory they have nowhere to go.
        OSError, MemoryError, torch.OutOfMemoryError: no room; nothing is lost and the call can be repeated.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        store: Store | Callable[[torch.device], Store] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._make_store = store if callable(store) else None
        self.store: Store | None = None if callable(store) else store
        self._tensors, self._prepare = tensors, prepare
        self._pieces: list[_Piece] = []
        self._pool: StoragePool | None = None

    def nbytes(self) -> int:
        """Bytes of the tensors, wherever they are."""
        if self._pieces:
            return sum(piece.nbytes for piece in self._pieces)
        return storage_bytes(self._tensors())

    def offload(self) -> None:
        """Copy the contents to the store and release the memory. What is there already is skipped."""
        if not any(piece.away for piece in self._pieces):
            if self._prepare is not None:
                self._prepare()
            self._pieces = self._plan()
        if not self._pieces:
            return
        store = self._store()
        store.reserve(self._pieces[-1].offset + self._pieces[-1].nbytes)
        for piece in self._pieces:
            if not piece.away:
                store.put(piece.offset, as_bytes(piece.storage))
                piece.saved = True
        store.wait()
        for piece in self._pieces:
            if not piece.away:
                self._pool_here().release(piece.storage)
                piece.away = True
        self._pool_here().all_released()

    def prefetch(self) -> None:
        """Start bringing the memory back: it is taken now and filled beside what is running.

        Only a hint: where there is no room yet, :meth:`onload` takes the rest later.
        """
        if self._pieces and self.store is not None:
            try:
                self._fetch()
            except (torch.OutOfMemoryError, OSError):
                pass

    def onload(self) -> None:
        """Take the memory back and fill it with its contents. What is back already is skipped."""
        if not self._pieces:
            return
        self._fetch()
        if self.store is not None:
            self.store.wait()
        self._pieces = []

    def drop(self) -> None:
        """Release the memory without keeping its contents; :meth:`onload` gives it back uninitialised."""
        if not self._pieces:
            if self._prepare is not None:
                self._prepare()
            self._pieces = self._plan()
        for piece in self._pieces:
            if not piece.away:
                self._pool_here().release(piece.storage)
            piece.away, piece.saved = True, False
        if self._pieces:
            self._pool_here().all_released()

    def close(self) -> None:
        """Free the store. Everything in it must have been onloaded before.

        Raises:
            RuntimeError: it has not.
        """
        if any(piece.away and piece.saved for piece in self._pieces):
            raise RuntimeError("offloaded tensors must come back before their host buffer is closed")
        if self.store is not None:
            self.store.close()
            self.store = None

    # -- inside ------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        for piece in self._pieces:
            if piece.away:
                self._pool_here().take(piece.storage, piece.nbytes)  # in the stream's order, see PinnedStore
                if piece.saved:
                    assert self.store is not None
                    try:
                        self.store.get(piece.offset, as_bytes(piece.storage))
                    except BaseException:
                        self._pool_here().release(piece.storage)
                        raise
                piece.away = False

    def _plan(self) -> list[_Piece]:
        pieces, end = [], 0
        for storage in distinct(self._tensors()):
            pieces.append(_Piece(storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        devices = {piece.storage.device for piece in pieces}
        if len(devices) > 1:
            raise ValueError(f"tensors of one owner must be on one device, not {sorted(map(str, devices))}")
        on_device = bool(pieces) and platform.of(pieces[0].storage.device).separate_memory
        if on_device and not all(piece.storage.resizable() for piece in pieces):
            raise ValueError("GPU memory that other processes map (or that is not torch's own) can't be offloaded")
        return pieces

    def _pool_here(self) -> StoragePool:
        if self._pool is None:
            self._pool = platform.of(self._pieces[0].storage.device).storage_pool()
        return self._pool

    def _store(self) -> Store:
        if self.store is None:
            if self._make_store is None:
                raise ValueError(
                    "tensors in host memory can only be offloaded to a file: set memory.offload_dir to a directory "
                    "on a disk, or turn memory.offload_optimizer and memory.offload_weights off"
                )
            self.store = self._make_store(self._pieces[0].storage.device)
        return self.store
