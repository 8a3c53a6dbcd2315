"""PolicyChunk: the layers of one pipeline stage (or of one of its chunks) as a GPTModel that answers with
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from hybridengine.engines.train.balancing import LoadBalance
from hybridengine.engines.train.base import MicroBatch
from hybridengine.engines.train.logprob import VocabShard, chunked_logprobs
from hybridengine.engines.train.megatron.batches import PaddedMicroBatch
from hybridengine.engines.train.megatron.kernels import Kernels
from hybridengine.engines.train.megatron.layers import Packing, RotaryAngles, block_spec
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.naming.megatron import MegatronLayout, local_name


@dataclass(frozen=True, slots=True)
class Scoring:
    """How log-probabilities are computed, the same for every micro-batch."""

    temperature: float
    chunk_tokens: int
    with_entropy: bool


class PolicyChunk(GPTModel):
    """See the module's text. The last one returns float32 [1, R] log-probabilities, or [2, R] with entropies below;
    the others return hidden states [s, b, H] for the next stage. Always trains: every dropout is 0."""

    def __init__(
        self,
        config: TransformerConfig,
        decoder: Decoder,
        layout: MegatronLayout,
        kernels: Kernels,
        *,
        layers: range,
        vp_stage: int | None,
        angles: RotaryAngles,
        scoring: Scoring,
        max_length: int,
        balance: LoadBalance | None = None,
    ) -> None:
        super().__init__(
            config,
            block_spec(decoder, config, layers, kernels),
            vocab_size=layout.padded_vocab(decoder.vocab),
            max_sequence_length=max_length,
            pre_process=layers.start == 0,
            post_process=layers.stop == decoder.num_layers,
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="none",
            vp_stage=vp_stage,
        )
        self.angles, self.scoring, self.balance = angles, scoring, balance
        if balance is not None:
            for layer in self.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    layer.mlp.router.routing = balanced(layer.mlp.router.routing, balance, layer.layer_number - 1)
        per_rank = layout.padded_vocab(decoder.vocab) // layout.tp
        start = ps.get_tensor_model_parallel_rank() * per_rank
        self.vocab_rows = min(per_rank, max(0, decoder.vocab - start))  # the rest is padding
        self.vocab_shard = VocabShard(ps.get_tensor_model_parallel_group(), start) if layout.tp > 1 else None

    def forward(self, padded: PaddedMicroBatch) -> Tensor:  # type: ignore[override]
        hidden = self.embedding(padded.input_ids, None) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self.angles(padded.positions),
            packed_seq_params=None if padded.layout is None else Packing(padded.layout),
            padding_mask=None if self.balance is None else ~self._share(padded.real),
        )
        return self._score(hidden, padded.micro) if self.post_process else hidden

    def _share(self, tokens: Tensor) -> Tensor:
        """[b, s] -> the columns that this rank's layers work on."""
        if not self.config.sequence_parallel:
            return tokens
        return tokens.chunk(ps.get_tensor_model_parallel_world_size(), dim=1)[ps.get_tensor_model_parallel_rank()]

    def _chosen(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        """[s, b, H], or this rank's share of s, -> [R, H] at the positions that predict a response token."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        # [s, b, H] -> the rows of micro.input_ids, without what was appended to them
        rows = hidden.transpose(0, 1)[: micro.input_ids.shape[0], : micro.input_ids.shape[1]]
        return rows.reshape(-1, rows.shape[-1]).index_select(0, micro.target_index)

    def _score(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        chosen = self._chosen(hidden, micro)
        if self.vocab_shard is not None:
            chosen = copy_to_tensor_model_parallel_region(chosen)
        logprobs, entropy = chunked_logprobs(
            chosen,
            self.output_weight()[: self.vocab_rows],
            micro.targets,
            temperature=self.scoring.temperature,
            chunk_tokens=self.scoring.chunk_tokens,
            with_entropy=self.scoring.with_entropy,
            shard=self.vocab_shard,
        )
        return torch.stack([logprobs] if entropy is None else [logprobs, entropy])

    def output_weight(self) -> Tensor:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueChunk(PolicyChunk):
    """The last one returns float32 [1, R] values of the states before the targets, from a head that every
    tensor-parallel rank has whole."""

    def __init__(self, config: TransformerConfig, decoder: Decoder, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, decoder, *args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.score = torch.nn.Linear(decoder.hidden, 1, bias=False, dtype=config.params_dtype)

    def _score(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        chosen = self._chosen(hidden, micro)
        return torch.mv(chosen.float(), self.score.weight[0].float())[None]


def balanced(routing: Callable[..., Any], balance: LoadBalance, layer: int) -> Callable[..., Any]:
    """A router's ``routing`` (logits [s, b, E] -> weights and choices [s * b, E]) that ``balance`` watches."""

    def watched(logits: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = routing(logits, padding_mask=padding_mask)
        weights = balance.weigh(layer, logits.view(-1, logits.shape[-1]), weights, ~padding_mask.reshape(-1))
        return weights, chosen

    return watched


def named_tensors(chunks: list[Any]) -> dict[str, torch.nn.Parameter]:
    """Parameters of this rank's chunks by the names the ShardMap uses: the local layers', by their global numbers."""
    found = {}
    for chunk in chunks:
        first = chunk.decoder.layers[0].layer_number - 1
        for name, param in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, index, inner = name.split(".", 3)
                name = f"decoder.layers.{int(index) + first}.{inner}"
            found[local_name(name)] = param
    return found
