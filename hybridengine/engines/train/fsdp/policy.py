"""PolicyModel: a transformers causal language model that answers with log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.engines.train.balancing import LoadBalance
from hybridengine.engines.train.base import MicroBatch, check_temperature
from hybridengine.engines.train.fsdp.attention import (
    PACKED,
    PackedLayout,
    attending,
    current_layout,
    register_packed_attention,
)
from hybridengine.engines.train.logprob import chunked_logprobs
from hybridengine.models.logits import LogitsRule


class PolicyModel(nn.Module):
    """Scores response tokens: decoder body, then chunked log-probabilities at the predicting positions only.

    Always in evaluation mode: dropout would make the trainer score another distribution than the one that
    was sampled. Parameter names are ``"model."`` plus the Hugging Face name.

    Args:
        model: AutoModelForCausalLM instance.
        temperature: logits are divided by it, as the sampler does.
        chunk_tokens: positions per [chunk, vocabulary] block.
        with_entropy: also return the entropy of each predicting distribution.
        activation_checkpointing: recompute each decoder layer in the backward pass.
        balance: watches the routers.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool = False,
        activation_checkpointing: bool = False,
        balance: LoadBalance | None = None,
    ) -> None:
        super().__init__()
        check_temperature(temperature)
        register_packed_attention()
        self.model = model.eval()
        self._rule = LogitsRule.of(model.config)
        self._padded = padded_attention(model)
        self.temperature, self.chunk_tokens, self.with_entropy = temperature, chunk_tokens, with_entropy
        self.balance = balance
        if balance is not None:
            balance.watch(decoder_layers(model))
        if activation_checkpointing:
            for layer in decoder_layers(model):
                # Not transformers' own switch: it works in train mode only, and train mode means dropout.
                # Wrapped below FSDP's hooks, so that the recomputation does not gather the layer again.
                layer.forward = checkpointed(layer.forward)

    def train(self, mode: bool = True) -> PolicyModel:
        """Stays in evaluation mode; see the class."""
        return super().train(False)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """float32 [R] log-probabilities of ``micro.targets``, and float32 [R] entropy or None."""
        if self.balance is not None:
            self.balance.current = micro.real
        hidden = self._hidden(micro)
        hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.target_index)
        head = self.model.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            micro.targets,
            temperature=self.temperature / self._rule.scale,
            softcap=self._rule.softcap_at(self.temperature),
            bias=getattr(head, "bias", None),
            chunk_tokens=self.chunk_tokens,
            with_entropy=self.with_entropy,
        )

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """Last hidden states, in the shape of ``micro.input_ids`` plus [H]."""
        decoder, config = self.model.get_decoder(), self.model.config
        inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "use_cache": False}
        if micro.attention_mask is None:
            layout = PackedLayout.from_lengths(micro.sequence_lengths.tolist(), micro.input_ids.device)
            config._attn_implementation = PACKED
            with attending(layout):
                return decoder(**inputs).last_hidden_state
        config._attn_implementation = self._padded
        return decoder(**inputs, attention_mask=micro.attention_mask).last_hidden_state


class ValueModel(PolicyModel):
    """A sequence classifier with one label: the value of the state before each response token.

    Args:
        model: AutoModelForSequenceClassification instance.
    """

    def forward(self, micro: MicroBatch) -> tuple[Tensor, None]:
        """float32 [R] values of the states before ``micro.targets``."""
        if self.balance is not None:
            self.balance.current = micro.real
        hidden = self._hidden(micro)
        hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.target_index)
        return torch.mv(hidden.float(), self.model.score.weight[0].float()), None


def padded_attention(model: Any) -> str:
    """The attention of transformers for padded rows: the fused one, but for models whose scores it does not have."""
    capped = getattr(model.config, "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    found = [layers for layers in lists if len(layers) == model.config.num_hidden_layers]
    if len(found) != 1:
        raise ValueError(f"model type {model.config.model_type!r} has no list of its decoder layers")
    return found[0]


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` that keeps its inputs only and runs again in the backward pass. Without random state: no dropout."""
    from torch.utils.checkpoint import checkpoint

    def run(layout: PackedLayout | None, *args: Any, **kwargs: Any) -> Any:
        with attending(layout):  # the backward pass runs it again, outside of the model's forward
            return forward(*args, **kwargs)

    def kept(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            run, current_layout(), *args,
            use_reentrant=False, preserve_rng_state=False, determinism_check="none", **kwargs,
        )  # fmt: skip

    return kept
