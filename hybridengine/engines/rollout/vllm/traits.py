"""EngineTraits of vLLM. Does not import vLLM."""

from hybridengine.engines.rollout.traits import EngineTraits

#: vllm/v1/attention/backends/cpu_attn.py; a test compares.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

TRAITS = EngineTraits(
    name="vllm",
    same_process="hybridengine.engines.rollout.vllm.engine:VLLMEngine",
    own_processes="hybridengine.engines.rollout.vllm.host:VLLMHost",
    packed_copy_on=frozenset({"cpu"}),
    head_sizes=(("cpu", CPU_HEAD_SIZES),),
)
