"""Sharded state on disk through torch.distributed.checkpoint, with failures that name the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp


def save_sharded(path: Path, state: dict[str, Any], planner: dcp.SavePlanner | None = None) -> None:
    """Write ``state`` into ``path``, one file per rank, on disk when this returns. Collective.

    Raises:
        RuntimeError: a rank could not write; on all ranks.
    """
    writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer, planner=planner)
    except dcp.CheckpointException as error:
        raise RuntimeError(f"checkpoint {path} could not be written: {_first_failure(error)}") from error


def load_sharded(path: Path, state: dict[str, Any], planner: dcp.LoadPlanner | None = None) -> None:
    """Fill ``state`` from what :func:`save_sharded` wrote, at this or another world size. Collective.

    Raises:
        ValueError: not a complete checkpoint of this model; on all ranks.
    """
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=planner)
    except dcp.CheckpointException as error:
        raise ValueError(f"checkpoint {path} cannot be loaded into this model: {_first_failure(error)}") from error


def _first_failure(error: Any) -> str:
    """Rank and message of the first failure in torch's CheckpointException, which prints all tracebacks."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
