"""The fsdp engine's part of the bill. Every parameter is cut into N chunks of ceil(rows / N), so the fullest rank holds
slightly more than P / N.

    training weights   4 · P/N          float32 master shards
    gradients          4 · P/N          float32, summed over micro-batches
    optimizer          8 · P/N          Adam's two moments
    gathered weights   see gathered     what FSDP holds of the full weights in ``b`` bytes
    activations        see activations
    logits             8 · chunk · V, and the head's float32 gradient where there are several chunks
"""

from __future__ import annotations

from hybridengine.config import Config
from hybridengine.memory.residency import GRADS, TRAINER_PARAMS
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.tools.sizes import (
    ACTIVATIONS,
    BYTES,
    GATHERED,
    GIB,
    LOGITS,
    full_numel,
    head_gradient_bytes,
    layer_bytes_per_token,
    logit_chunk_bytes,
    shard_numel,
    units,
)

#: Full weights up to this size stay gathered: the fsdp engine's own constant, which lives beside torch imports.
KEEP_GATHERED_BYTES = 2 << 30


class FSDPTraining:
    """See Training in :mod:`hybridengine.tools.bill`."""

    resting_gradients = 0
    frozen_waits_on_host = True  # FSDP keeps a frozen model's shards there and streams them

    def __init__(self, d: Decoder, config: Config, *, ranks: int) -> None:
        self.d, self.config = d, config
        self.b = BYTES[config.train.dtype]
        self.full, self.shard = full_numel(d), shard_numel(d, ranks)
        reshard = config.train.reshard_after_forward
        self.keeps_gathered = self.full * self.b <= KEEP_GATHERED_BYTES if reshard is None else not reshard
        self.weights = self.reference = 4 * self.shard
        self.optimizer = 8 * self.shard

    def gathered(self) -> int:
        """Bytes of full weights beside the shards: all, or the root unit, one decoder unit and the next one twice."""
        if self.keeps_gathered:
            return self.full * self.b
        unit, root, _ = units(self.d, self.b)
        return (root + 3 * unit) * self.b

    def activations(self) -> int:
        """For one micro-batch of T tokens, at the start of its backward pass."""
        tokens = max(self.config.train.max_tokens_per_micro_batch, 1)
        layer = layer_bytes_per_token(self.d, self.config.train.dtype) * tokens
        if self.config.train.activation_checkpointing:
            return self.d.num_layers * self.b * self.d.hidden * tokens + layer
        # The final norm and the hidden states of the response tokens come on top.
        return self.d.num_layers * layer + (4 + 3 * self.b) * self.d.hidden * tokens

    def forward_backward(self) -> dict[str, int]:
        """The largest of several moments of the backward pass.

        Gathered unit by unit: at the head, all activations, logits and the head's gradient; in the first decoder
        unit, its activations are used up, its gradients in ``b`` bytes and the float32 buffer they are reduced from
        have come instead; at the end, no activations, but the root unit's gradients and their buffer. Kept gathered:
        full gradients in float32 from the second micro-batch on, reduced to shards only when activations are gone.
        """
        unit, root, layers = units(self.d, self.b)
        weights, activations = self.gathered(), self.activations()
        logits = logit_chunk_bytes(self.config, self.d.vocab)
        logits += head_gradient_bytes(self.config, self.d.vocab * self.d.hidden)
        shard = 4 * self.shard
        if self.keeps_gathered:
            full = weights + 4 * self.full
            moments = [(full, activations, logits, 0), (full, 0, 0, shard)]
        else:
            left = activations - activations * layers // self.d.num_layers
            head = self.d.vocab * self.d.hidden * self.b
            moments = [
                # One decoder unit is on its way: its all-gather buffer and its weights.
                ((root + 2 * unit) * self.b, activations, logits, shard),
                (weights + unit * (self.b + 4), left, head, shard),
                (weights + root * (self.b + 4), 0, 0, shard),
            ]
        gathered, activations, logits, grads = max(moments, key=sum)
        return {TRAINER_PARAMS: shard, GRADS: grads, GATHERED: gathered, ACTIVATIONS: activations, LOGITS: logits}

    def optimizer_step(self) -> dict[str, int]:
        """Weights that were kept gathered are still there when the step begins."""
        gathered = self.full * self.b if self.keeps_gathered else 0
        return {GATHERED: gathered, TRAINER_PARAMS: 4 * self.shard, GRADS: 4 * self.shard}

    def describe(self) -> tuple[str, str]:
        size = f"{self.full / 1e9:.2f} B parameters; {4 * self.shard / GIB:.1f} GiB float32 shard per rank"
        return size, f"FSDP {'keeps the full weights gathered' if self.keeps_gathered else 'gathers unit by unit'}"
