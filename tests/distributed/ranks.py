"""``run_ranks``: run one function on every rank of a gloo job of fresh processes.

The processes come from a fork server that has imported the slow modules and run nothing: as isolated as
spawned ones, but started in a fraction of a second instead of several.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import select
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hybridengine.distributed.world import World

_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
]


class RankFailure(AssertionError):
    """A rank raised, died or timed out; the message carries its rank and traceback."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, group: bool = True
) -> list[Any]:
    """Run ``fn(world, *args)`` on ``world_size`` new processes and return their results by rank.

    The processes share a gloo group over a file store in a temporary directory. ``fn`` must be importable
    (a module-level function), its arguments and result picklable. On the first failure the others are killed.

    Args:
        timeout: seconds until every rank must have finished; also the limit of each collective.
        group: start torch.distributed; False leaves it to ``fn``.

    Raises:
        RankFailure: the first rank that raised (with its traceback), exited, or was still running at the limit.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, world_size, directory, timeout, sender, fn, args, group), daemon=True
            )
            process.start()
            sender.close()
            ranks.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, ranks, time.monotonic() + timeout, fn.__name__)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def run_casualties(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    directory: Path,
    timeout: float = 60.0,
    group: bool = True,
) -> list[tuple[int | None, Any]]:
    """Like :func:`run_ranks`, for ranks that are meant to die: (exit code, result) by rank; no result when killed.

    Raises:
        RankFailure: a rank that was not killed raised.
    """
    context = multiprocessing.get_context("spawn")
    jobs = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(rank, world_size, str(directory), timeout, sender, fn, args, group), daemon=True
        )
        process.start()
        sender.close()
        jobs.append((process, receiver))
    found: list[tuple[int | None, Any]] = []
    for rank, (process, receiver) in enumerate(jobs):
        process.join(timeout)
        if process.exitcode != 0:
            found.append((process.exitcode, None))
            continue
        ok, value = pickle.loads(receiver.recv_bytes())
        if not ok:
            raise RankFailure(f"{fn.__name__}: rank {rank} of {world_size} failed:\n{value}")
        found.append((0, value))
    return found


def _collect(pipes: list[Connection], ranks: list[Any], deadline: float, name: str) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailure(f"{name}: ranks {missing} of {len(pipes)} still running at the time limit")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(timeout=5)
                raise RankFailure(f"{name}: rank {rank} exited with code {ranks[rank].exitcode}") from None
            if not ok:
                raise RankFailure(f"{name}: rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    rank: int,
    size: int,
    directory: str,
    timeout: float,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple,
    group: bool = True,
) -> None:
    """Body of one process: environment, process group, the function, its result or traceback into the pipe."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    threading.Thread(target=_end_with_reader, args=(pipe,), daemon=True).start()
    faulthandler.enable()  # a crash in native code shows where it was called from
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(directory) / "store"), size)
        if group:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        result = fn(World(rank=rank, size=size, local_rank=rank, local_size=size), *args)
        payload = pickle.dumps((True, result))
    except BaseException:  # noqa: BLE001  the parent re-raises it
        payload = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(payload)
    pipe.close()
    sys.stdout.flush()
    # Not destroy_process_group: on failure peers may be stuck in a collective, and the parent kills them.
    os._exit(0)


def _end_with_reader(pipe: Connection) -> None:
    """A rank must not outlive a test process that was killed, waiting for its peers until the time limit."""
    poll = select.poll()
    poll.register(pipe.fileno(), 0)  # nothing but POLLERR: the reading end is gone
    poll.poll()
    os._exit(1)
