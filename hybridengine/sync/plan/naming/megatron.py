"""Where megatron-core puts the parameters of a decoder under TP, PP, EP and DP. Pure integers.

Rules of the local layer spec; Transformer Engine's layers hold the same under other names (:func:`local_name`). TP rank
r of t holds

==================================  ==========================================================================
``linear_qkv.{weight,bias}``        the r-th 1/t of the rows [for each KV group: its query heads, k, v], even
                                    where that cuts a group
``linear_fc1.{weight,bias}``        rows [gate.chunk(t)[r]; up.chunk(t)[r]]
``linear_proj``, ``linear_fc2``     column chunk r
``word_embeddings``, output layer   vocabulary zero-padded to a multiple of ``divisor * t``, row chunk r
norms, router, shared expert gate   whole
==================================  ==========================================================================

Pipeline stages hold consecutive layers; a tied model on several stages has a copy of the embedding on the
last one (``output_layer.weight``). Expert e lives on expert rank ``e // (E / ep)``. Local tensor names carry
*global* layer numbers and *local* expert numbers. Ranks are numbered as megatron does: TP fastest, then DP
(expert ranks fastest inside it), then PP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybridengine.sync.plan.boxes import Ints, contiguous_strides
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.families import HFConfig, decoder_of
from hybridengine.sync.plan.naming.parameters import SCORE, canonical_params
from hybridengine.sync.plan.spec import Holding, ParamSpec, Pattern, Piece, ShardMap

#: Norm names, canonical -> megatron.
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
#: Where Transformer Engine's layers name a parameter otherwise than the local ones: (its name, theirs).
RENAMED = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_"), ".input_layernorm."),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_"), ".pre_mlp_layernorm."),
    (re.compile(r"\.mlp\.experts\.(linear_fc[12])\.([a-z]+)(\d+)$"), r".mlp.experts.local_experts.\3.\1.\2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Parallel degrees. ``world_size`` = tp * dp * pp; ``ep`` divides dp; experts are cut by ``tp`` too.

    Attributes:
        stages: pipeline stage of each layer; None: equal consecutive runs (no virtual pipeline).
        vocab_divisor: megatron's ``make_vocab_size_divisible_by``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    stages: tuple[int, ...] | None = None
    vocab_divisor: int = 128

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp rank, expert rank, stage)."""
        return rank % self.tp, rank // self.tp % self.dp % self.ep, rank // (self.tp * self.dp)

    def padded_vocab(self, vocab: int) -> int:
        multiple = self.vocab_divisor * self.tp
        return -(-vocab // multiple) * multiple

    def stage_of(self, num_layers: int) -> tuple[int, ...]:
        if self.stages is not None:
            if len(self.stages) != num_layers or set(self.stages) != set(range(self.pp)):
                raise ValueError(f"stages {self.stages} do not assign {num_layers} layers to {self.pp} stages")
            return self.stages
        if num_layers % self.pp:
            raise ValueError(f"{num_layers} layers are not divisible by pipeline size {self.pp}")
        return tuple(layer // (num_layers // self.pp) for layer in range(num_layers))


def local_name(name: str) -> str:
    """The local layers' name of a parameter, given theirs or Transformer Engine's.

    >>> local_name("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
    'decoder.layers.3.input_layernorm.weight'
    >>> local_name("decoder.layers.3.mlp.experts.linear_fc1.weight7")
    'decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight'
    """
    for theirs, ours in RENAMED:
        name = theirs.sub(ours, name)
    return name


class _Cut(NamedTuple):
    """A way to cut: equal cuts of equal shapes on equal sets of ranks share a Pattern."""

    kind: str
    shape: Ints
    detail: tuple[int, ...]


class _Place(NamedTuple):
    """Tensors, by slot, and for each slot the (stage, expert rank or -1) that hold it."""

    tensors: tuple[str, ...]
    where: tuple[tuple[int, int], ...]


def megatron_shard_map(
    config: HFConfig, layout: MegatronLayout, *, dtype: str = "float32", values: bool = False
) -> ShardMap:
    """Which slices of the checkpoint's parameters every Megatron rank holds.

    ``values``: of the model with ``score.weight`` [1, H], whole on the last stage, in place of an output projection.

    Raises:
        ValueError: degrees that do not divide heads, layers, experts or sizes, all named; an architecture
            whose layers megatron's local spec does not have.
    """
    decoder = decoder_of(config)
    _check(decoder, layout)
    stages = layout.stage_of(decoder.num_layers)
    params = canonical_params(config)
    if values:
        params.pop("lm_head.weight", None)
        params[SCORE] = ParamSpec(SCORE, (1, decoder.hidden), "float32")
        decoder = replace(decoder, tied=False)
    patterns: dict[tuple[_Cut, tuple[tuple[int, int], ...]], Pattern] = {}
    holdings = {}
    for name, spec in params.items():
        cut, place = _rule(name, spec.shape, decoder, layout, stages)
        if (cut, place.where) not in patterns:
            patterns[cut, place.where] = Pattern(spec.shape, _ranks(cut, place.where, decoder, layout))
        holdings[name] = Holding(patterns[cut, place.where], place.tensors)
    return ShardMap.from_holdings(params, holdings, dict.fromkeys(params, dtype), layout.world_size).validate()


def _check(decoder: Decoder, layout: MegatronLayout) -> None:
    tp, faults = layout.tp, []
    if any(norm not in NORMS for norm in decoder.norms):
        faults.append(f"{decoder.architecture} has norms {decoder.norms}, megatron layers have {tuple(NORMS)}")
    sizes = {
        "attention heads": decoder.heads,
        "rows of the fused qkv": decoder.q_rows + 2 * decoder.kv_rows,
        "MLP hidden units": decoder.intermediate,
    }
    if decoder.heads % decoder.kv_heads:
        faults.append(f"{decoder.heads} heads are not divisible by {decoder.kv_heads} KV groups")
    if max(tp, decoder.kv_heads) % min(tp, decoder.kv_heads):
        faults.append(f"{decoder.kv_heads} KV groups and tp={tp}: neither divides the other")
    if decoder.experts is not None:
        sizes["expert hidden units"] = decoder.experts.size
        if decoder.experts.shared_size:
            sizes["shared expert hidden units"] = decoder.experts.shared_size
        if decoder.experts.count % layout.ep:
            faults.append(f"{decoder.experts.count} experts are not divisible by ep={layout.ep}")
    elif layout.ep > 1:
        faults.append(f"ep={layout.ep} for {decoder.architecture}, which has no experts")
    if layout.dp % layout.ep:
        faults.append(f"ep={layout.ep} does not divide dp={layout.dp}")
    faults += [f"{size} {what} are not divisible by tp={tp}" for what, size in sizes.items() if size % tp]
    if faults:
        raise ValueError("this model does not fit the Megatron layout: " + "; ".join(faults))


def _rule(
    name: str, shape: Ints, decoder: Decoder, layout: MegatronLayout, stages: Sequence[int]
) -> tuple[_Cut, _Place]:
    """The cut of a canonical parameter, and the tensors and ranks it goes to."""
    first, last = (0, -1), (layout.pp - 1, -1)
    if name == "model.embed_tokens.weight":
        place = _Place(("embedding.word_embeddings.weight",), (first,))
        if decoder.tied and layout.pp > 1:
            place = _Place((*place.tensors, "output_layer.weight"), (first, last))
        return _Cut("vocab", shape, ()), place
    if name == "lm_head.weight":
        return _Cut("vocab", shape, ()), _Place(("output_layer.weight",), (last,))
    if name == "model.norm.weight":
        return _Cut("whole", shape, ()), _Place(("decoder.final_layernorm.weight",), (last,))
    if name == SCORE:
        return _Cut("whole", shape, ()), _Place((SCORE,), (last,))
    _, _, index, inner = name.split(".", 3)
    here = ((stages[int(index)], -1),)
    head = f"decoder.layers.{index}"
    module, _, kind = inner.rpartition(".")
    block, _, leaf = module.rpartition(".")

    def at(cut: str, tensor: str, *detail: int) -> tuple[_Cut, _Place]:
        return _Cut(cut, shape, detail), _Place((f"{head}.{tensor}",), here)

    if module in NORMS:
        return at("whole", f"{NORMS[module]}.{kind}")
    if block == "self_attn":
        if leaf in ("q_proj", "k_proj", "v_proj"):
            return at("qkv", f"self_attention.linear_qkv.{kind}", "qkv".index(leaf[0]))
        if leaf == "o_proj":
            return at("columns", f"self_attention.linear_proj.{kind}")
        return at("whole", f"self_attention.{leaf.replace('norm', 'layernorm')}.{kind}")
    moe = decoder.experts
    if moe is not None and block.startswith(f"{moe.block}.experts."):
        expert, per_rank = int(block.rsplit(".", 1)[1]), moe.count // layout.ep
        local = f"{head}.mlp.experts.local_experts.{expert % per_rank}"
        where = ((stages[int(index)], expert // per_rank),)
        if leaf == moe.down:
            return _Cut("columns", shape, ()), _Place((f"{local}.linear_fc2.{kind}",), where)
        return _Cut("fc1", shape, (int(leaf == moe.up),)), _Place((f"{local}.linear_fc1.{kind}",), where)
    if leaf == "gate":
        return at("whole", f"mlp.router.{kind}")
    if leaf == "shared_expert_gate":
        return at("whole", "mlp.shared_experts.gate_weight")
    target = "mlp.shared_experts" if block.endswith(".shared_expert") else "mlp"
    if leaf == "down_proj":
        return at("columns", f"{target}.linear_fc2.{kind}")
    return at("fc1", f"{target}.linear_fc1.{kind}", int(leaf == "up_proj"))


def _ranks(
    cut: _Cut, where: Sequence[tuple[int, int]], decoder: Decoder, layout: MegatronLayout
) -> list[tuple[Piece, ...]]:
    ranks = []
    for rank in range(layout.world_size):
        tp_rank, expert_rank, stage = layout.coordinates(rank)
        held: list[Piece] = []
        for slot, (on_stage, on_expert_rank) in enumerate(where):
            if stage == on_stage and on_expert_rank in (-1, expert_rank):
                held += _pieces(cut, slot, tp_rank, decoder, layout)
        ranks.append(tuple(held))
    return ranks


def _pieces(cut: _Cut, slot: int, tp_rank: int, decoder: Decoder, layout: MegatronLayout) -> Iterator[Piece]:
    """The pieces of tensor-parallel rank ``tp_rank``."""
    shape, tp = cut.shape, layout.tp
    if cut.kind == "columns" and len(shape) == 2:
        columns = shape[1] // tp
        yield Piece((0, tp_rank * columns), (shape[0], columns), slot, 0, (columns, 1))
        return
    tail, strides = shape[1:], contiguous_strides(shape)

    def rows(first: int, count: int, position: int) -> Piece:
        """Canonical rows, at row ``position`` of the local tensor."""
        return Piece((first, *(0 for _ in tail)), (count, *tail), slot, position * strides[0], strides)

    if cut.kind in ("whole", "columns"):  # the bias of a row-parallel layer is whole
        yield rows(0, shape[0], 0)
    elif cut.kind == "vocab":
        per_rank = layout.padded_vocab(shape[0]) // tp
        first = min(tp_rank * per_rank, shape[0])
        if count := min(first + per_rank, shape[0]) - first:
            yield rows(first, count, 0)
    elif cut.kind == "fc1":
        count = shape[0] // tp
        yield rows(tp_rank * count, count, cut.detail[0] * count)
    elif cut.kind == "qkv":
        for canonical, fused, count in _qkv_runs(decoder, cut.detail[0]):
            per_rank = (decoder.q_rows + 2 * decoder.kv_rows) // tp
            low, high = max(fused, tp_rank * per_rank), min(fused + count, (tp_rank + 1) * per_rank)
            if low < high:
                yield rows(canonical + low - fused, high - low, low - tp_rank * per_rank)
    else:
        raise AssertionError(cut.kind)


def _qkv_runs(decoder: Decoder, which: int) -> Iterator[tuple[int, int, int]]:
    """(canonical row, row of the fused tensor, rows) of q (0), k (1) or v (2), one run per KV group."""
    per_group = decoder.heads // decoder.kv_heads
    group_rows = (per_group + 2) * decoder.head_dim
    for group in range(decoder.kv_heads):
        if which == 0:
            yield group * per_group * decoder.head_dim, group * group_rows, per_group * decoder.head_dim
        else:
            inside = (per_group + which - 1) * decoder.head_dim
            yield group * decoder.head_dim, group * group_rows + inside, decoder.head_dim
