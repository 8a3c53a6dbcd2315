"""Failed runs: one error message, from one rank, as the last output, and the process's exit status.

Under torchrun the message goes into torchelastic's error file: torchrun prints it last, after its own lines, as the
root cause. Ranks other than the first wait a moment before they report, and those whose error only follows from
another's (PeerError) longer: torchrun has ended them by then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from hybridengine.config.schema import ConfigError

#: Exit statuses: an error of the program or of what it calls; what the user has to change, as argparse has it; rollouts
#: can't go on, and the run's last state is saved and can be resumed.
FAILED, USAGE_ERROR, ROLLOUT_LOST = 1, 2, 3

#: Before a rank reports: an error of its own, on another rank than 0, which may have it as well; an error that another
#: rank reports, unless nobody did.
WAIT_OTHER_RANK, WAIT_NO_ERROR_OF_ITS_OWN = 5.0, 8.0

_PACKAGE = Path(__file__).resolve().parent


def report(error: BaseException, rank: int) -> int:
    """Print the error once over all ranks.

    Args:
        error: what ended the run on this rank.
        rank: this rank.

    Returns:
        the exit status.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the run's own handler would wait for a step that never ends
    time.sleep(_wait_seconds(error, rank))
    text = describe(error)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        _write_error_file(Path(file), text)
    else:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    return status_of(error)


def _wait_seconds(error: BaseException, rank: int) -> float:
    if rank == 0 and isinstance(error, ConfigError):  # before torch is imported
        return 0.0
    from hybridengine.distributed.errors import PeerError

    if isinstance(error, PeerError):
        return WAIT_NO_ERROR_OF_ITS_OWN
    return 0.0 if rank == 0 else WAIT_OTHER_RANK


def status_of(error: BaseException) -> int:
    """The exit status that an error leads to."""
    if isinstance(error, ConfigError):
        return USAGE_ERROR
    from hybridengine.schedule.base import RolloutLostError

    return ROLLOUT_LOST if isinstance(error, RolloutLostError) else FAILED


def describe(error: BaseException) -> str:
    """A sentence for what the user can act on, the user's own frames for a failing reward, else the whole traceback."""
    if isinstance(error, ConfigError):  # before torch is imported
        return f"hybridengine: {error}"
    from hybridengine.rewards.base import RewardError
    from hybridengine.schedule.base import RolloutLostError

    if isinstance(error, RolloutLostError):
        return f"hybridengine: {error}"
    if isinstance(error, RewardError):
        return "\n".join([*_own_frames(error.__cause__), f"hybridengine: {error}"])
    return "".join(traceback.format_exception(error)).rstrip()


def _own_frames(error: BaseException | None) -> list[str]:
    """The traceback of the user's function, without the frames that lead to it."""
    if error is None or error.__traceback__ is None:
        return []
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(_PACKAGE)]
    lines = traceback.format_list(frames) if frames else []
    return ["Traceback of the reward function:", *(line.rstrip() for line in lines)] if lines else []


def _write_error_file(path: Path, text: str) -> None:
    """In the form that torch.distributed.elastic reads (multiprocessing/errors/error_handler.py)."""
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
