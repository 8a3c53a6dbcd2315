"""The megatron engine's part of the bill: pipeline stages differ, so each is added up and the largest counts.

n parameters of a rank of stage s: matrices and the (padded) vocabulary cut by t, experts by their ranks too, norms and
routers whole, a tied head on a stage of its own a second time. D replicas, e of them share the experts. Bytes:

    training weights   b · n            the weights that training computes with
    gradients          4 · n            float32 buffers, which outlive the step
    optimizer          8 · n/D          Adam's moments (experts: n/(D/e)); bfloat16: 4 · n/D of master weights too
    activations        see activations  of as many micro-batches as the stage has under way
    logits             8 · chunk · V/t, and the head's gradient, on the last stage
    staging            CPU: gloo reduces gradients (4 · n) and gathers weights (b · n) beside the buffers
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from hybridengine.config import Config
from hybridengine.engines.train.megatron.degrees import layout_of
from hybridengine.memory.residency import GRADS, TRAINER_PARAMS
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.megatron import MegatronLayout
from hybridengine.tools.sizes import (
    ACTIVATIONS,
    BYTES,
    GIB,
    LOGITS,
    STAGING,
    full_numel,
    head_gradient_bytes,
    logit_chunk_bytes,
)


class StageNumel(NamedTuple):
    """Elements of a rank: its dense parameters and its experts."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def layout_for(d: Decoder, config: Config, ranks: int) -> MegatronLayout:
    """The degrees of the ``train`` section on so many ranks.

    Raises:
        ValueError: degrees that do not divide ranks, layers, heads, sizes or experts.
    """
    train, moe = config.train, d.experts
    if ranks % (train.tp * train.pp):
        raise ValueError(f"train.tp={train.tp} train.pp={train.pp}: must divide the {ranks} rank(s)")
    layout = layout_of(train, d, ranks)
    if layout.dp % train.ep or train.ep > 1 and (moe is None or moe.count % train.ep):
        raise ValueError(f"train.ep={train.ep}: must divide the {layout.dp} replica(s) and the experts")
    sizes = {d.heads, d.intermediate, d.q_rows + 2 * d.kv_rows} | ({moe.size, moe.shared_size} if moe else set())
    if any(size % train.tp for size in sizes):
        raise ValueError(f"train.tp={train.tp}: must divide heads and hidden units, which are {sorted(sizes - {0})}")
    return layout


@functools.cache
def stage_numel(d: Decoder, layout: MegatronLayout) -> tuple[StageNumel, ...]:
    """Elements of the ranks of each stage; vocabulary padding included."""
    assert layout.stages is not None
    last, tp = layout.pp - 1, layout.tp
    dense, experts = [0] * layout.pp, [0] * layout.pp
    vocab = layout.padded_vocab(d.vocab) // tp * d.hidden
    for name, shape in d.shapes().items():
        numel, parts = math.prod(shape), name.split(".")
        module = parts[-2]
        if module == "embed_tokens":
            dense[0] += vocab
            dense[last] += vocab if d.tied and last else 0
        elif module == "lm_head":
            dense[last] += vocab
        elif parts[1] != "layers":
            dense[last] += numel
        elif ".experts." in name:
            experts[layout.stages[int(parts[2])]] += numel // tp
        else:
            row_parallel_bias = module in ("o_proj", "down_proj") and len(shape) == 1
            whole = module.endswith("norm") or module in ("gate", "shared_expert_gate") or row_parallel_bias
            dense[layout.stages[int(parts[2])]] += numel if whole else numel // tp
    return tuple(StageNumel(n, e // layout.ep) for n, e in zip(dense, experts, strict=True))


class MegatronTraining:
    """See Training in :mod:`hybridengine.tools.bill`.

    Raises:
        ValueError: degrees that do not fit the model or the ranks.
    """

    def __init__(
        self,
        d: Decoder,
        config: Config,
        *,
        top_k: int,
        ranks: int,
        is_cuda: bool,
        offload_optimizer: bool,
        offload_weights: bool,
    ) -> None:
        self.d, self.config, self.top_k, self.is_cuda = d, config, top_k, is_cuda
        self.b = BYTES[config.train.dtype]
        self.layout = layout_for(d, config, ranks)
        self.stages = stage_numel(d, self.layout)
        self._fullest = max(range(self.layout.pp), key=lambda stage: self.stages[stage].total)
        self.weights = self.reference = self.b * self.stages[self._fullest].total
        self.optimizer = max(map(self._optimizer, self.stages))
        self.resting_gradients = 0 if offload_optimizer else 4 * self.stages[self._fullest].total
        self.frozen_waits_on_host = offload_weights

    def _optimizer(self, stage: StageNumel) -> int:
        masters = 4 if self.config.train.dtype == "bfloat16" else 0
        dp = self.layout.dp
        return (8 + masters) * (-(-stage.dense // dp) + -(-stage.experts * self.layout.ep // dp))

    def _buffer(self, stage: StageNumel) -> int:
        """Elements that are reduced or gathered together: experts over other ranks have buffers of their own."""
        return stage.total if self.layout.ep == 1 else max(stage)

    def layer_bytes_per_token(self, layer: int) -> int:
        """What autograd keeps of a layer of megatron's, per token, on one rank.

        Norms as in the fsdp engine, cut by sequence parallelism. Attention: the fused projection, of which the values
        are a view, rotated queries and keys, the output, its log-sum-exp, and cosines and sines of queries and keys;
        with norms on queries and keys their normalised values, and in bfloat16 their float32 inputs. MLP: gate and up
        in one, silu(gate), up again (an offset of 0 is added to it), product. An expert also keeps its product before
        and after the router's weight, and its own copy of the input; loads are taken to be even.
        """
        d, b, tp = self.d, self.b, self.layout.tp
        shared = tp if self.config.train.sequence_parallel else 1
        norms = len(d.norms) * (4 + 2 * b) * d.hidden // shared
        attention = (b * 3 * (d.q_rows + d.kv_rows) + 4 * d.heads) // tp + 4 * b * d.head_dim
        if d.qk_norm:
            attention += (b + (4 if b < 4 else 0)) * (d.q_rows + d.kv_rows) // tp
        if not d.has_experts(layer):
            return norms + attention + 5 * b * d.intermediate // tp
        moe = d.experts
        assert moe is not None
        routed = self.top_k * (6 * b * moe.size // tp + b * d.hidden) + 32 * moe.count // shared
        return norms + attention + routed + 5 * b * moe.shared_size // tp

    def under_way(self, stage: int) -> int:
        """Micro-batches (of one chunk of layers each) that a stage has seen forward and not backward, at most."""
        pp, vpp = self.layout.pp, self.config.train.vpp
        return pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1

    def activations(self, stage: int) -> tuple[int, int]:
        """Of all micro-batches under way, when the backward pass of the first begins; and what recomputing a layer adds
        later, when the head is done (else 0)."""
        d, b, train = self.d, self.b, self.config.train
        tokens = max(train.max_tokens_per_micro_batch, 1)
        assert self.layout.stages is not None
        own = [layer for layer, place in enumerate(self.layout.stages) if place == stage]
        sizes = [self.layer_bytes_per_token(layer) for layer in own]
        hidden = b * d.hidden // (self.layout.tp if train.sequence_parallel else 1)
        kept = hidden * len(own) if train.activation_checkpointing else sum(sizes)
        kept = -(-kept * self.under_way(stage) // train.vpp)  # a chunk is one of vpp parts of the stage
        if self.layout.pp > 1:
            kept += hidden * self.under_way(stage)  # what it passed on
        if stage == self.layout.pp - 1:
            kept += (4 + 3 * b) * d.hidden  # the final norm, and hidden states of the response tokens
        return tokens * kept, tokens * max(sizes) if train.activation_checkpointing else 0

    def logits(self) -> int:
        """One chunk of this rank's columns, and the head's gradient."""
        rows = self.layout.padded_vocab(self.d.vocab) // self.layout.tp
        return logit_chunk_bytes(self.config, rows) + head_gradient_bytes(self.config, rows * self.d.hidden)

    def forward_backward(self) -> dict[str, int]:
        """The largest of all stages; on a CPU also the end, when gradients are reduced beside their buffers."""
        found = []
        for stage, numel in enumerate(self.stages):
            state = {TRAINER_PARAMS: self.b * numel.total, GRADS: 4 * numel.total}
            logits = self.logits() if stage == self.layout.pp - 1 else 0
            kept, recomputed = self.activations(stage)
            found.append(state | {ACTIVATIONS: kept, LOGITS: logits})
            found.append(state | {ACTIVATIONS: kept + recomputed})
            if not self.is_cuda:
                found.append(state | {STAGING: 4 * self._buffer(numel)})
        return max(found, key=lambda owners: sum(owners.values()))

    def optimizer_step(self) -> dict[str, int]:
        stage = self.stages[self._fullest]
        gathered = {} if self.is_cuda else {STAGING: self.b * self._buffer(stage)}
        return {TRAINER_PARAMS: self.b * stage.total, GRADS: 4 * stage.total} | gathered

    def describe(self) -> tuple[str, str]:
        degrees = {name: getattr(self.layout, name) for name in ("tp", "pp", "dp", "ep")}
        cut = " × ".join(f"{name.upper()} {size}" for name, size in degrees.items() if size > 1) or "one rank"
        size = f"{full_numel(self.d) / 1e9:.2f} B parameters; {self.weights / GIB:.1f} GiB of weights per rank"
        return size, f"megatron: {cut}"
