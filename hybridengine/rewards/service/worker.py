"""A worker process: takes a request, calls a reward function, answers with its numbers."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridengine.process_control import adopt_orphans, die_with, limit_memory
from hybridengine.rewards.service.wire import LARGEST_REPLY, FrameReader, send_frame
from hybridengine.rewards.signatures import Call, call


@dataclass(slots=True)
class Request:
    """One call of a reward function.

    Attributes:
        fn: as it is configured, a built-in's name or ``path.py:function``; each worker loads it once.
        form: of its signature, see signatures.py.
        kwargs: from the configuration.
        calls: the samples.
        confine: no writing and no signals to other processes from now on, as far as this kernel can (Landlock).
    """

    fn: str
    form: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    confine: bool = False


def run(connection: socket.socket, *, parent: int, memory: int, nice: int) -> None:
    """Serve ``connection`` until its other end is closed, or until this process is killed; does not return."""
    die_with(parent)
    adopt_orphans()
    os.setpgid(0, 0)
    os.nice(nice)
    limit_memory(memory)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a function prints is for people, not for the launcher's standard output
    random.seed()  # forked from one process, all would draw the same numbers
    reader, functions = FrameReader(connection), dict[str, Callable[..., Any]]()
    while (content := reader.read()) is not None:
        reply = json.dumps(answer(pickle.loads(content), functions)).encode()
        if len(reply) > LARGEST_REPLY:
            reply = json.dumps(_error("value", ValueError(f"a result of {len(reply)} bytes"))).encode()
        send_frame(connection, reply)


def answer(request: Request, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """``{"values": [[score or None, {extra: number}], ...]}``, one pair per sample, or ``{"error": ...}``.

    An error is ``{"kind", "message", "traceback", "score"}``; its kind is ``refused`` (the function raised a
    ValueError), ``exception`` (another), ``exit`` (it called sys.exit), ``memory``, ``value`` (what it returned is no
    number) or ``timeout`` (of a verifier's own, which says what the sample scores).
    """
    from hybridengine.rewards.load import load_function
    from hybridengine.rewards.signatures import ResultError, TimeLimitError

    try:
        if request.fn not in functions:
            functions[request.fn] = load_function(request.fn)
        if request.confine:
            confine()
        values = call(functions[request.fn], request.form, request.calls, request.kwargs)
        return {"values": [[value.score, value.extras] for value in values]}
    except ResultError as error:
        return _error("value", error)
    except TimeLimitError as error:
        return _error("timeout", error, score=error.score)
    except MemoryError as error:
        return _error("memory", error)
    except (SystemExit, KeyboardInterrupt) as error:
        return _error("exit", error)
    except Exception as error:  # noqa: BLE001  whatever the function raises is reported to the trainer
        return _error("refused" if isinstance(error, ValueError) else "exception", error)


def _error(kind: str, error: BaseException, *, score: float = 0.0) -> dict[str, Any]:
    return {
        "error": {
            "score": score,
            "kind": kind,
            "message": (str(error) if kind in ("value", "timeout") else f"{type(error).__name__}: {error}")[:2000],
            "traceback": "".join(traceback.format_exception(error))[-8000:],
        }
    }


def confine() -> None:
    """Irreversible, for this process: it may read libraries and write nothing; signals stay inside it."""
    from hybridengine.rewards.code.sandbox import confinement

    if (policy := confinement()) is not None:
        import sandlock

        sandlock.confine(policy)
