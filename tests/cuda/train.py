"""``python -m tests.cuda.train <overrides>``: a whole training run whose device is the stand-in for a GPU.

``HYBRIDENGINE_STANDIN_GIB`` sets the device's memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.cuda import standin

SITE = Path(__file__).parent / "site"


def install() -> None:
    """The stand-ins for this process; the environment for those that it starts."""
    gib = float(os.environ.setdefault("HYBRIDENGINE_STANDIN_GIB", "64"))
    standin.install(int(gib * standin.GIB))
    root = Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), str(root)])
    from hybridengine.engines.rollout.vllm.patches import ENVIRONMENT

    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    from tests.cuda import vllm_standin

    vllm_standin.install()


def main() -> int:
    install()
    if "DEADLY" in os.environ:
        from tests.e2e import deadly  # noqa: F401  kills an engine's process now and then
    from hybridengine.train import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
