"""EngineTraits of the transformers engine."""

from hybridengine.engines.rollout.traits import EngineTraits

TRAITS = EngineTraits(
    name="transformers",
    same_process="hybridengine.engines.rollout.transformers.engine:TransformersEngine",
    tensor_parallel=False,
    kv_cache_grows=True,
)
