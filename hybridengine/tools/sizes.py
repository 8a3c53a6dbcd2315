"""Counts of elements and bytes that follow from a model's configuration alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hybridengine.config import Config
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.vllm import padded_vocab

GIB = 2**30
#: What a bill lists beside residency's owners.
GATHERED, ACTIVATIONS, LOGITS, STAGING, CONTEXT = "gathered_weights", "activations", "logits", "staging", "context"
BYTES = {"float32": 4, "bfloat16": 2}
#: FSDP gathers decoder layers together up to this size: the fsdp engine's own constant.
UNIT_BYTES = 64 << 20


def hf_config(values: Mapping[str, Any]) -> Any:
    """A config.json's content as the object the parameter tables read."""
    return SimpleNamespace(**{"tie_word_embeddings": False, **values})


@functools.cache
def shard_numel(d: Decoder, ranks: int) -> int:
    """Elements of the fullest rank's shards: each parameter cut along dimension 0 into chunks of ceil(rows / N)."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in d.shapes().values())


@functools.cache
def full_numel(d: Decoder) -> int:
    return sum(math.prod(shape) for shape in d.shapes().values())


@functools.cache
def rollout_numel(d: Decoder, tp: int) -> int:
    """Elements of one tensor-parallel rank: matrices / t, at least one KV head, norms and routers whole."""
    found = 0
    for name, shape in d.shapes().items():
        numel, last = math.prod(shape), name.rsplit(".", 2)[-2]
        if name.startswith(("model.embed_tokens", "lm_head")):
            found += padded_vocab(shape[0]) * shape[1] // tp
        elif last in ("k_proj", "v_proj"):
            found += numel // min(tp, d.kv_heads)
        elif last in ("o_proj", "down_proj") and len(shape) == 1:
            found += numel
        elif last.endswith("norm") or last in ("gate", "shared_expert_gate"):
            found += numel
        else:
            found += numel // tp
    return found


@functools.cache
def units(d: Decoder, width: int) -> tuple[int, int, int]:
    """(elements of the largest group of decoder layers that FSDP gathers together, elements of the root unit:
    embeddings, head, final norm and layers left over; layers in that group). ``width``: bytes per element."""
    layers, outside = [0] * d.num_layers, 0
    for name, shape in d.shapes().items():
        parts = name.split(".")
        if parts[1] == "layers":
            layers[int(parts[2])] += math.prod(shape)
        else:
            outside += math.prod(shape)
    largest, count, unit, members = 0, 0, 0, 0
    for numel in layers:
        unit, members = unit + numel, members + 1
        if unit * width >= UNIT_BYTES:
            if unit > largest:
                largest, count = unit, members
            unit, members = 0, 0
    return largest, outside + unit, count


def logit_chunk_bytes(config: Config, columns: int) -> int:
    """One chunk's float32 logits and the temporary beside them."""
    chunk = min(config.train.logprob_chunk_tokens, config.train.max_tokens_per_micro_batch)
    return chunk * columns * (12 if config.algorithm.entropy_coef else 8)


def head_gradient_bytes(config: Config, elements: int) -> int:
    """The output projection's gradient: summed in float32 where there are several chunks of logits, then cast."""
    several = config.train.max_tokens_per_micro_batch > config.train.logprob_chunk_tokens
    return elements * (BYTES[config.train.dtype] + (4 if several else 0))


def kv_bytes_per_token(d: Decoder, *, tp: int, dtype: str) -> int:
    """Keys and values of one token on one tensor-parallel rank."""
    return 2 * d.num_layers * max(1, d.kv_heads // tp) * d.head_dim * BYTES[dtype]


def layer_bytes_per_token(d: Decoder, dtype: str) -> int:
    """What autograd keeps of one decoder layer for its backward pass, per token.

    Two norms: the float32 input, the normalised value and the output, 4H + bH + bH each. Attention: queries,
    keys, values and the output in ``b`` bytes, its log-sum-exp in float32. MLP: gate, silu(gate), up, product.
    Experts: the MLP of as many experts as a token visits is not known here; the dense width stands for them.
    """
    b, norms = BYTES[dtype], len(d.norms)
    attention = b * (2 * d.q_rows + 2 * d.kv_rows) + 4 * d.heads
    return norms * (4 + 2 * b) * d.hidden + attention + 4 * b * d.intermediate
