"""Balance between experts: the Switch Transformer's auxiliary loss over the whole batch of an optimizer step.

    loss += coef * sum over layers of  E * sum_i f_i * P_i           (arXiv:2101.03961, equations 4 to 6)

E experts; f_i the share of all choices (tokens * experts per token) that fell on expert i, P_i the mean probability
that the router gives it. A balanced layer has 1. f and P are taken over the real tokens, prompts included, of all
micro-batches and ranks (arXiv:2501.11873): a product of two means of one micro-batch would depend on how the batch was
cut.

f has no gradient, so with f known the loss is a sum over tokens, and each token's share goes backward with the
micro-batch it is in. f is known from a forward pass before the one that trains, the price of an exact balance.

Routing itself stays as it is. The other way to balance, a bias per expert that only the choice sees (arXiv:2408.15664),
would have to be known to whoever generates; the checkpoints of these architectures have no tensor for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.config import TrainConfig
from hybridengine.sync.plan.naming import decoder_of


def check_balancing(train: TrainConfig, config: Any) -> None:
    """Refuse a balance that the model of this Hugging Face configuration can't have.

    Raises:
        ValueError: naming the key and why.
    """
    if train.moe_balancing == "none":
        return
    decoder = decoder_of(config)
    if decoder.experts is None:
        raise ValueError(
            f"train.moe_balancing={train.moe_balancing}: {decoder.architecture} has no experts to balance; use none"
        )
    if train.moe_balancing == "bias":
        raise ValueError(
            f"train.moe_balancing=bias: a checkpoint of {decoder.architecture} has no tensor for a bias per expert, so "
            "the rollout engine would choose other experts than the trainer; use aux_loss"
        )


class LoadBalance:
    """Counts the experts that routers choose, and adds the load-balancing loss.

    Use: everything inside ``with balance.counting()`` is counted; the passes with gradients that follow carry the loss.

    Attributes:
        current: bool, the real tokens of the micro-batch that is running, for routers that are not told them.
    """

    current: Tensor

    def __init__(self, coef: float, *, layers: int, experts: int, top_k: int, device: torch.device) -> None:
        self.coef, self.top_k = coef, top_k
        self._choices = torch.zeros(layers, experts, dtype=torch.float32, device=device)
        self._probabilities = torch.zeros_like(self._choices)  # summed over tokens
        self._slopes = torch.zeros_like(self._choices)  # of the loss by each of these sums
        self._counts = False

    @classmethod
    def of(cls, train: TrainConfig, config: Any, device: torch.device) -> LoadBalance | None:
        """For a model of this Hugging Face configuration; None where nothing is to be balanced.

        Raises:
            ValueError: see :func:`check_balancing`.
        """
        check_balancing(train, config)
        if train.moe_balancing == "none":
            return None
        decoder = decoder_of(config)
        assert decoder.experts is not None
        return cls(
            train.moe_balancing_coef,
            layers=decoder.num_layers,
            experts=decoder.experts.count,
            top_k=config.num_experts_per_tok,
            device=device,
        )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Collective over all training ranks at its end: counts of all of them, one batch's and no earlier one's.

        Every token must pass every router on exactly one rank.
        """
        totals = (self._choices, self._probabilities)
        for total in totals:
            total.zero_()
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
        for total in totals:
            dist.all_reduce(total)
        tokens = self._choices.sum(1, keepdim=True).clamp(min=1) / self.top_k
        self._slopes = self.coef * self._choices.shape[1] * self._choices / (self.top_k * tokens.square())

    def weigh(self, layer: int, logits: Tensor, weights: Tensor, real: Tensor) -> Tensor:
        """Pass the ``weights`` of the chosen experts on, with this router's share of the loss tied to them.

        Args:
            layer: of the model, from 0.
            logits: [T, E] of the router.
            weights: of any shape, on the way to the experts.
            real: bool [T], tokens that are no padding.
        """
        if self._counts:
            probabilities = logits.detach().float().softmax(-1)
            chosen = probabilities.topk(self.top_k).indices[real]
            self._choices[layer] += torch.bincount(chosen.flatten(), minlength=logits.shape[1])
            self._probabilities[layer] += probabilities[real].sum(0)
        elif torch.is_grad_enabled() and logits.requires_grad:
            probabilities = torch.where(real[:, None], logits.float().softmax(-1), 0.0)
            weights = _WithLoss.apply(weights, (probabilities.sum(0) * self._slopes[layer]).sum())
        return weights

    def metrics(self) -> dict[str, float]:
        """Of what was counted last, the same on all ranks: the loss without its coefficient, mean over layers with
        experts (1: balanced), and the busiest expert's load of any layer as a multiple of the mean."""
        experts = self._choices.shape[1]
        counted = self._choices.sum(1) > 0
        choices, probabilities = self._choices[counted], self._probabilities[counted]
        if not len(choices):
            return {}
        shares = choices / choices.sum(1, keepdim=True)
        losses = experts * (shares * probabilities / probabilities.sum(1, keepdim=True)).sum(1)
        return {
            "moe/load_balancing_loss": losses.mean().item(),
            "moe/max_expert_load": experts * shares.max().item(),
        }

    def watch(self, layers: nn.ModuleList) -> None:
        """Attach to transformers' routers, which answer (logits [T, E], weights, indices)."""
        routers = [
            (index, module)
            for index, layer in enumerate(layers)
            for module in layer.modules()
            if type(module).__name__.endswith("TopKRouter")
        ]
        if not routers:
            raise ValueError("train.moe_balancing=aux_loss: this version of transformers has no router to attach to")

        def hook(index: int) -> Any:
            def forward_hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
                logits, weights, indices = output
                return logits, self.weigh(index, logits, weights, self.current.flatten()), indices

            return forward_hook

        for index, router in routers:
            router.register_forward_hook(hook(index))


class _WithLoss(torch.autograd.Function):
    """Returns the values unchanged; their backward pass also runs the backward pass of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:  # type: ignore[override]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
