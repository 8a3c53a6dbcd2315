"""The program, with an engine process of rank 0 (of the rollout pool) killed at the moments that DEADLY names.

    DEADLY=request:20,token:7,sync:3    SIGKILL at the 20th sample that is asked for, before the 7th token of a stream,
                                        and in the middle of the 3rd weight sync

A moment that would come again in the repeated step does not kill again: calls are counted on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridengine.engines.rollout.remote.stream import RemoteStream
from hybridengine.sync.transfer.pull import PullTransfer

MOMENTS = {(kind, int(number)) for kind, number in (m.split(":") for m in os.environ["DEADLY"].split(",") if m)}
counts: Counter[str] = Counter()


def engine_processes() -> list[int]:
    """Children of this process that serve an engine."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"engines.rollout.remote.serve" in (entry / "cmdline").read_bytes():
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def counted(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        counts[kind] += 1
        if (kind, counts[kind]) in MOMENTS and os.environ["RANK"] == "0":
            for process in engine_processes()[:1]:  # a training pool has a rank 0 too, and no engine
                print(f"DEADLY: {kind} {counts[kind]}: killing {process}", flush=True)
                os.kill(process, signal.SIGKILL)
        return original(*arguments, **options)

    return wrapped


RemoteStream.submit = counted("request", RemoteStream.submit)  # type: ignore[method-assign]
RemoteStream.step = counted("token", RemoteStream.step)  # type: ignore[method-assign]
PullTransfer.run = counted("sync", PullTransfer.run)  # type: ignore[method-assign]

if __name__ == "__main__":
    from hybridengine.train import main

    sys.exit(main())
