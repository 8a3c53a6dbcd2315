"""EngineTraits of SGLang. Does not import SGLang."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hybridengine.engines.rollout.traits import EngineTraits

TRAITS = EngineTraits(
    name="sglang",
    own_processes="hybridengine.engines.rollout.sglang.host:SGLangHost",
    process_per_rank=False,
    interpreter="hybridengine.engines.rollout.sglang.traits:interpreter",
    share_includes_activations=False,
)


def interpreter() -> Path:
    """The Python of ``.venv-sglang`` beside this environment; ``HYBRIDENGINE_SGLANG_PYTHON`` names another.

    Raises:
        ValueError: there is none.
    """
    named = os.environ.get("HYBRIDENGINE_SGLANG_PYTHON")
    found = Path(named) if named else Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"
    if not found.is_file():
        where = "HYBRIDENGINE_SGLANG_PYTHON names it" if named else "run `make install-sglang`"
        raise ValueError(f"rollout.engine=sglang: no interpreter at {found}; {where}")
    return found
