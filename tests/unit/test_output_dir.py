"""output_dir belongs to one run at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridengine.config.schema import ConfigError
from hybridengine.validate.output_dir import claim

HOLD = """
import sys, time
from hybridengine.validate.output_dir import claim
lock = claim(sys.argv[1])
print(1, flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).parents[2]


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Killed in any way: the lock is the kernel's, and nothing stale is left."""
    directory = tmp_path / "outputs" / "run"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout is not None and first.stdout.readline()
    with pytest.raises(
        ConfigError, match=rf"another run writes to it \(process {first.pid} on .*\); .*output_dir={directory}-2"
    ):
        claim(directory)
    first.send_signal(signal.SIGKILL)
    first.wait()
    claim(directory).close()
    claim(directory).close()


@pytest.mark.parametrize("name", ["/proc/nothing", "file/run"])
def test_what_can_not_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir=.*: can't be written"):
        claim(tmp_path / name)
