"""Storages: the memory behind tensors and their views."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once; without empty ones."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    return sum(storage.nbytes() for storage in distinct(tensors))


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A uint8 tensor over the whole storage, its memory itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
