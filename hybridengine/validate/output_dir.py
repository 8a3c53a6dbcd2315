"""output_dir belongs to one run at a time: it can be written, and no other run writes to it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from hybridengine.config.schema import ConfigError

LOCK = ".lock"


def claim(output_dir: Path | str) -> IO[str]:
    """Lock ``output_dir``, which is made where it is not there.

    The lock ends with this process, in whatever way it ends; it is the kernel's, so that nothing stale is left.

    Returns:
        the lock; it is held until it is closed.

    Raises:
        ConfigError: another run holds it, or nothing can be written there.
    """
    directory = Path(output_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"output_dir={output_dir}: can't be written ({error.strerror}); give another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise ConfigError(
            f"output_dir={output_dir}: another run writes to it{f' ({holder})' if holder else ''}; end that one, or "
            f"give output_dir={free_name(str(output_dir))}"
        ) from None
    except OSError:  # a file system without locks
        return lock
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def free_name(output_dir: str) -> str:
    """``outputs/run-2``, or the next number that is free."""
    number = 2
    while Path(f"{output_dir}-{number}").exists():
        number += 1
    return f"{output_dir}-{number}"
