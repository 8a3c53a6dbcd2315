"""Agree, then raise: an error on one rank becomes the same error on all ranks, and nobody hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class PeerError(RuntimeError):
    """Another rank failed in the phase that this rank completed."""


class PeerLostError(RuntimeError):
    """Another rank died, gave up, or did not answer in time."""


#: Name of the phase outside of any.
OUTSIDE = "start"

_phase = threading.local()
_main: tuple[str, float] = (OUTSIDE, time.monotonic())
_longest: dict[str, float] = {}


def current_phase() -> str:
    """Name of the innermost running phase, for messages; ``OUTSIDE`` outside of one."""
    return getattr(_phase, "name", OUTSIDE)


def main_phase() -> tuple[str, float]:
    """The main thread's innermost phase, and since when (``time.monotonic``); for other threads to read."""
    return _main


def longest_run(name: str) -> float | None:
    """Seconds of the longest completed run of a phase on the main thread; None before the first."""
    return _longest.get(name)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what runs inside. A collective that times out inside is re-raised with the phase's name."""
    global _main
    outer, outer_main, watched = current_phase(), _main, threading.current_thread() is threading.main_thread()
    begin = time.monotonic()
    _phase.name = name
    if watched:
        _main = (name, begin)
    try:
        yield
        if watched:
            _longest[name] = max(_longest.get(name, 0.0), time.monotonic() - begin)
    except RuntimeError as error:
        text = str(error)
        of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)  # our own say more themselves
        if of_torch and ("imed out" in text or "timeout" in text.lower()) and "phase" not in text:
            raise TimeoutError(
                f"phase {name!r}: a collective timed out; another rank is stuck or gone. "
                f"Raise distributed.timeout_seconds if the phase is only slow. Cause: {text}"
            ) from error
        raise
    finally:
        _phase.name = outer
        if watched:
            _main = outer_main


@contextmanager
def agree(action: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run local work; then all ranks agree whether it worked anywhere, and raise together if it did not.

    The body must contain no collective that another rank's failure could leave unmatched.

    Raises:
        the body's own exception on the ranks where it failed, PeerError naming the first of them elsewhere.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  re-raised below, after the ranks have agreed
        error = caught
    raise_together(error, action, group)


def raise_together(error: BaseException | None, action: str, group: dist.ProcessGroup | None = None) -> None:
    """All-reduce "did anything fail"; raise on every rank of ``group`` if so, on none otherwise.

    Where a rank is lost and nobody can agree any more, a rank that has an error of its own raises that.
    """
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        try:
            _raise_for_peers(error, action, group)
        except (RuntimeError, ValueError):  # ValueError: what failed has taken the process group down with it
            if error is None:
                raise
    if error is not None:
        raise error


def _raise_for_peers(error: BaseException | None, action: str, group: dist.ProcessGroup | None) -> None:
    """Raises PeerError where another rank has an error and this one has none."""
    flag = torch.tensor([error is not None], dtype=torch.int64)
    dist.all_reduce(flag, group=group)
    if not flag.item():
        return
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is None:
        failed = {rank: text for rank, text in enumerate(messages) if text}
        rank, text = next(iter(failed.items()))
        raise PeerError(f"{action}: rank {rank} failed ({len(failed)} of {len(messages)} ranks): {text}")
