"""The facts about a decoder-only model that decide its parameters' names, shapes and cuts."""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.sync.plan.boxes import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts blocks of a model.

    Attributes:
        block: module name of the block in its layer ("mlp", "block_sparse_moe").
        count: experts per layer.
        size: hidden units of one expert.
        gate, up, down: names of an expert's projections in the checkpoint.
        shared_size: hidden units of the shared expert, 0 without one. It comes with a scalar gate.
        layers: the layers that have experts; the others have a dense MLP.
    """

    block: str
    count: int
    size: int
    gate: str
    up: str
    down: str
    shared_size: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder-only transformer. Sizes are counts of elements; ``norms`` are per-layer norm names."""

    architecture: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    experts: Experts | None = None

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    def shapes(self) -> dict[str, Ints]:
        """Every checkpoint parameter and its shape. A tied output projection is not a parameter."""
        found: dict[str, Ints] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            found.update({f"model.layers.{layer}.{name}": shape for name, shape in self._layer(layer).items()})
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found

    def _layer(self, layer: int) -> dict[str, Ints]:
        attention: dict[str, Ints] = {}
        for name, rows in (("q", self.q_rows), ("k", self.kv_rows), ("v", self.kv_rows)):
            attention[f"self_attn.{name}_proj.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                attention[f"self_attn.{name}_proj.bias"] = (rows,)
        attention["self_attn.o_proj.weight"] = (self.hidden, self.q_rows)
        if self.o_bias:
            attention["self_attn.o_proj.bias"] = (self.hidden,)
        if self.qk_norm:
            attention |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        mlp = self._experts() if self.has_experts(layer) else self._mlp("mlp", self.intermediate)
        return attention | mlp | {f"{norm}.weight": (self.hidden,) for norm in self.norms}

    def _mlp(self, block: str, size: int) -> dict[str, Ints]:
        found: dict[str, Ints] = {
            f"{block}.gate_proj.weight": (size, self.hidden),
            f"{block}.up_proj.weight": (size, self.hidden),
            f"{block}.down_proj.weight": (self.hidden, size),
        }
        if self.mlp_bias:
            found |= {
                f"{block}.gate_proj.bias": (size,),
                f"{block}.up_proj.bias": (size,),
                f"{block}.down_proj.bias": (self.hidden,),
            }
        return found

    def _experts(self) -> dict[str, Ints]:
        moe = self.experts
        assert moe is not None
        found: dict[str, Ints] = {f"{moe.block}.gate.weight": (moe.count, self.hidden)}
        for expert in range(moe.count):
            prefix = f"{moe.block}.experts.{expert}"
            found[f"{prefix}.{moe.gate}.weight"] = (moe.size, self.hidden)
            found[f"{prefix}.{moe.up}.weight"] = (moe.size, self.hidden)
            found[f"{prefix}.{moe.down}.weight"] = (self.hidden, moe.size)
        if moe.shared_size:
            found |= self._mlp(f"{moe.block}.shared_expert", moe.shared_size)
            found[f"{moe.block}.shared_expert_gate.weight"] = (1, self.hidden)
        return found
