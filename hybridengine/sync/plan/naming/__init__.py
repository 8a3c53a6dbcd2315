"""Parameter names and row orders, per architecture: the checkpoint's, transformers', vLLM's, Megatron's."""

from hybridengine.sync.plan.naming.families import ARCHITECTURES, decoder_of
from hybridengine.sync.plan.naming.huggingface import (
    as_causal,
    describe_model,
    describe_value_model,
    stored_tensors,
)
from hybridengine.sync.plan.naming.megatron import MegatronLayout, megatron_shard_map
from hybridengine.sync.plan.naming.parameters import SCORE, canonical_params
from hybridengine.sync.plan.naming.vllm import vllm_slices, vllm_table_map

__all__ = [
    "ARCHITECTURES",
    "SCORE",
    "MegatronLayout",
    "as_causal",
    "canonical_params",
    "decoder_of",
    "describe_model",
    "describe_value_model",
    "megatron_shard_map",
    "stored_tensors",
    "vllm_slices",
    "vllm_table_map",
]
