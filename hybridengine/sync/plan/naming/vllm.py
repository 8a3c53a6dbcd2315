"""Where vLLM puts the parameters of a decoder at tensor-parallel size t: an explicit table.

Production runs bake the map from the engine itself (:mod:`hybridengine.sync.plan.bake`); the table is what
the baked map is checked against, and what plans a layout when no engine is at hand. Rank r of t holds

========================  =====================================================================
``qkv_proj``              rows [q_r; k_r; v_r]; with t > KV heads, rank r holds KV head ⌊r·kv/t⌋
``gate_up_proj``          rows [gate_r; up_r]
``o_proj``, ``down_proj`` column chunk r
embedding, ``lm_head``    vocabulary padded to 64, row chunk r; the padding rows hold no parameter
``experts.w13_weight``    [E, 2f/t, h]: per expert rows [gate_r; up_r]
``experts.w2_weight``     [E, h, f/t]: per expert column chunk r
norms, router, gates      whole
========================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hybridengine.sync.plan.boxes import Ints, contiguous_strides
from hybridengine.sync.plan.merge import RankLayout, merge_layouts
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.families import HFConfig, decoder_of
from hybridengine.sync.plan.naming.parameters import canonical_params
from hybridengine.sync.plan.spec import ShardMap, TensorSlice

#: vLLM and SGLang pad the vocabulary to a multiple of this before they cut it; a test compares.
VOCAB_MULTIPLE = 64


def padded_vocab(size: int) -> int:
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def tensor_parallel_fits(config: HFConfig, tp: int) -> bool:
    """Whether ``tp`` ranks can share the model: heads, MLP width and padded vocabulary divide, and KV heads divide or
    are divided."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    cut = (heads, padded_vocab(config.vocab_size), mlp_width(config))
    return not any(size % tp for size in cut) and (kv_heads % tp == 0 or tp % kv_heads == 0)


def mlp_width(config: HFConfig) -> int:
    """Of an expert, where there are experts."""
    return int(getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 0)


def vllm_slices(config: HFConfig, *, tp: int, rank: int) -> tuple[TensorSlice, ...]:
    """The slices of tensor-parallel rank ``rank`` of ``tp``.

    Raises:
        ValueError: heads, KV heads or MLP sizes that ``tp`` does not divide (as vLLM itself refuses).
    """
    return tuple(_Rank(decoder_of(config), tp, rank).slices())


def vllm_table_map(config: HFConfig, *, tp: int, world_size: int, dtype: str = "bfloat16") -> ShardMap:
    """The map of ``world_size // tp`` replicas on consecutive ranks (rank r is tensor-parallel rank r mod tp).

    ``dtype`` is the engine's; the parameters themselves are described as :func:`canonical_params` does.
    """
    if world_size % tp:
        raise ValueError(f"{world_size} ranks can't form tensor-parallel groups of {tp}")
    layouts = []
    for rank in range(tp):
        slices = vllm_slices(config, tp=tp, rank=rank)
        layouts.append(RankLayout.of(slices, {item.tensor: dtype for item in slices}))
    return merge_layouts(canonical_params(config), [layouts[rank % tp] for rank in range(world_size)])


class _Rank:
    def __init__(self, decoder: Decoder, tp: int, rank: int) -> None:
        self.decoder, self.tp, self.rank = decoder, tp, rank
        if decoder.heads % tp:
            raise ValueError(f"{decoder.heads} attention heads are not divisible by tensor-parallel size {tp}")
        if max(tp, decoder.kv_heads) % min(tp, decoder.kv_heads):
            raise ValueError(f"{decoder.kv_heads} KV heads and tensor-parallel size {tp}: neither divides the other")

    def slices(self) -> Iterator[TensorSlice]:
        for name, shape in self.decoder.shapes().items():
            found = self._vocab(name, shape) if name in VOCAB else self._one(name, shape)
            if found.numel:  # the last ranks may hold vocabulary padding only
                yield found

    def _one(self, name: str, shape: Ints) -> TensorSlice:
        prefix, _, leaf = name.rpartition("layers.")
        if not prefix:
            return self._whole(name, shape)
        index, _, inner = leaf.partition(".")
        head = f"{prefix}layers.{index}"
        module, _, kind = inner.rpartition(".")
        block, _, last = module.rpartition(".")
        if ".experts." in inner:
            return self._expert(name, shape, head, inner)
        rule: dict[str, Callable[[], TensorSlice]] = {
            "q_proj": lambda: self._qkv(name, shape, f"{head}.self_attn.qkv_proj.{kind}", "q"),
            "k_proj": lambda: self._qkv(name, shape, f"{head}.self_attn.qkv_proj.{kind}", "k"),
            "v_proj": lambda: self._qkv(name, shape, f"{head}.self_attn.qkv_proj.{kind}", "v"),
            "gate_proj": lambda: self._gate_up(name, shape, f"{head}.{block}.gate_up_proj.{kind}", 0),
            "up_proj": lambda: self._gate_up(name, shape, f"{head}.{block}.gate_up_proj.{kind}", 1),
            "o_proj": lambda: self._columns(name, shape),
            "down_proj": lambda: self._columns(name, shape),
        }
        return rule[last]() if last in rule else self._whole(name, shape)

    def _whole(self, name: str, shape: Ints) -> TensorSlice:
        return TensorSlice(name, (0,) * len(shape), shape, name, 0, contiguous_strides(shape))

    def _rows(self, name: str, shape: Ints, tensor: str, first: int, count: int, position: int) -> TensorSlice:
        strides = contiguous_strides(shape)
        offsets, sizes = (first, *(0,) * (len(shape) - 1)), (count, *shape[1:])
        return TensorSlice(name, offsets, sizes, tensor, position * strides[0], strides)

    def _chunk(self, name: str, extent: int) -> int:
        if extent % self.tp:
            raise ValueError(f"{name}: {extent} is not divisible by tensor-parallel size {self.tp}")
        return extent // self.tp

    def _qkv(self, name: str, shape: Ints, tensor: str, which: str) -> TensorSlice:
        d = self.decoder
        kv_heads = max(1, d.kv_heads // self.tp)
        q, kv = self._chunk(name, d.q_rows), kv_heads * d.head_dim
        position = {"q": 0, "k": q, "v": q + kv}[which]
        if which == "q":
            return self._rows(name, shape, tensor, self.rank * q, q, position)
        sharers = max(1, self.tp // d.kv_heads)
        return self._rows(name, shape, tensor, self.rank // sharers * kv, kv, position)

    def _gate_up(self, name: str, shape: Ints, tensor: str, which: int) -> TensorSlice:
        rows = self._chunk(name, shape[0])
        return self._rows(name, shape, tensor, self.rank * rows, rows, which * rows)

    def _columns(self, name: str, shape: Ints) -> TensorSlice:
        if len(shape) == 1:  # the bias of a row-parallel layer is added once, after the reduction
            return self._whole(name, shape)
        columns = self._chunk(name, shape[1])
        return TensorSlice(name, (0, self.rank * columns), (shape[0], columns), name, 0, (columns, 1))

    def _vocab(self, name: str, shape: Ints) -> TensorSlice:
        padded = padded_vocab(shape[0])
        rows = self._chunk(name, padded)
        first = min(self.rank * rows, shape[0])
        return self._rows(name, shape, name, first, min(first + rows, shape[0]) - first, 0)

    def _expert(self, name: str, shape: Ints, head: str, inner: str) -> TensorSlice:
        moe = self.decoder.experts
        assert moe is not None
        _, expert, projection = inner.rsplit(".", 1)[0].rsplit(".", 2)
        size, tensor = self._chunk(name, moe.size), f"{head}.{moe.block}.experts.routed_experts"
        if projection == moe.down:
            start = int(expert) * shape[0] * size
            return TensorSlice(name, (0, self.rank * size), (shape[0], size), f"{tensor}.w2_weight", start, (size, 1))
        row = int(expert) * 2 * size + (size if projection == moe.up else 0)
        return self._rows(name, shape, f"{tensor}.w13_weight", self.rank * size, size, row)


VOCAB = ("model.embed_tokens.weight", "lm_head.weight")
