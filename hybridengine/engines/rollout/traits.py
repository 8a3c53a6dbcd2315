"""EngineTraits: the properties of a rollout engine that are needed before it is imported.

Validation, the memory bill, the doctor and messages read traits; none of them looks at an engine's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hybridengine.config import RolloutConfig
from hybridengine.plugins import load_object

#: rollout.engine -> "module:TRAITS". A new engine is one folder, one line here and one YAML; one from outside this
#: package is named in the configuration as it stands here, or as path.py:TRAITS.
ENGINES = {
    "vllm": "hybridengine.engines.rollout.vllm.traits:TRAITS",
    "sglang": "hybridengine.engines.rollout.sglang.traits:TRAITS",
    "transformers": "hybridengine.engines.rollout.transformers.traits:TRAITS",
}

_REMOTE = "hybridengine.engines.rollout.remote.engine:RemoteEngine"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One engine. "module:name" may also be "path.py:name".

    Attributes:
        name: as in ``rollout.engine``.
        same_process: "module:class" of the RolloutEngine in the trainer's processes; None: it has none.
        own_processes: "module:class" of its Host in processes of its own (see remote/serve.py); None: it has none.
        process_per_rank: each tensor-parallel rank is a process that we start; False: the engine starts them itself.
        interpreter: "module:function" that returns the Python of the engine's own environment; None: this one.
        tensor_parallel: whether it can span several ranks.
        kv_cache_grows: the KV cache is as large as what is being generated; False: it is built with a fixed size.
        share_includes_activations: of a GPU's share, activations are taken before the KV cache is built.
        packed_copy_on: platforms where a second, packed copy of the weights is held.
        head_sizes: platform -> sizes of attention heads that it has kernels for; absent: all.
    """

    name: str
    same_process: str | None = None
    own_processes: str | None = None
    process_per_rank: bool = True
    interpreter: str | None = None
    tensor_parallel: bool = True
    kv_cache_grows: bool = False
    share_includes_activations: bool = True
    packed_copy_on: frozenset[str] = frozenset()
    head_sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def kernels_for(self, platform: str, head_size: int) -> bool:
        """Whether it has attention kernels for heads of this size."""
        sizes = dict(self.head_sizes).get(platform)
        return sizes is None or head_size in sizes

    def python(self) -> Path | None:
        """The interpreter of its own environment, None for this one. Raises ValueError when it is missing."""
        return None if self.interpreter is None else load_object(self.interpreter, "rollout.engine")()


@cache
def traits_of(engine: str) -> EngineTraits:
    """The traits of the engine that ``rollout.engine`` names.

    Raises:
        ValueError: there is none of that name.
    """
    if engine not in ENGINES and ":" not in engine:
        raise ValueError(
            f"rollout.engine={engine}: must be one of {' | '.join(ENGINES)}, or name an engine of your own as "
            "path.py:TRAITS or package.module:TRAITS"
        )
    found = load_object(ENGINES.get(engine, engine), "rollout.engine")
    if not isinstance(found, EngineTraits):
        raise ValueError(f"rollout.engine={engine}: is a {type(found).__name__}, not EngineTraits")
    return found


def runs_in_own_processes(rollout: RolloutConfig) -> bool:
    """Whether the engine runs in processes of its own."""
    return rollout.process == "separate" or traits_of(rollout.engine).same_process is None


def engine_class(rollout: RolloutConfig) -> Any:
    """The class of the RolloutEngine that ``rollout.engine`` and ``rollout.process`` name.

    Raises:
        ValueError: it does not run that way.
    """
    traits = traits_of(rollout.engine)
    where = traits.same_process
    if rollout.process != "same" and runs_in_own_processes(rollout):
        where = None if traits.own_processes is None else _REMOTE
    if where is None:
        raise ValueError(f"rollout.process={rollout.process}: {traits.name} does not run that way")
    return load_object(where, "rollout.engine")
