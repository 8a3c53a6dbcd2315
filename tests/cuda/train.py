"""``python -m tests.cuda.train <overrides>``: a whole training run whose device is the stand-in for a GPU.

``HYBRIDENGINE_STANDIN_GIB`` sets the device's memory.
"""

from __future__ import annotations

import os
import sys

from tests.cuda import standin


def main() -> int:
    standin.install(int(float(os.environ.get("HYBRIDENGINE_STANDIN_GIB", "64")) * standin.GIB))
    from hybridengine.engines.rollout.vllm.patches import ENVIRONMENT

    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    from tests.cuda import vllm_standin

    vllm_standin.install()
    from hybridengine.train import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
