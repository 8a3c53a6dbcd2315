"""Losses of one forward_backward: the user's loss function on each micro-batch, its metrics added up."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.distributed.errors import raise_together
from hybridengine.engines.train.base import LossFn, LossResult, MicroBatch


def is_maximum(metric: str) -> bool:
    """Whether a metric of a loss function is a maximum over tokens (of what is 0 or more) instead of a sum."""
    return metric.endswith("_max")


class LossSum:
    """Calls a loss function micro-batch by micro-batch. A failure waits until no peer is in a collective."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self._metrics: dict[str, Tensor] = {}
        self._error: Exception | None = None

    def add(self, logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> Tensor:
        """This micro-batch's loss, for the backward pass; one without effect where nothing of it is in the loss (or
        the function failed), because the backward collectives of all ranks have to match."""
        try:
            result = self._loss_fn(logprobs, entropy, micro)
        except Exception as caught:  # noqa: BLE001  raised by finish
            self._error = self._error or caught
            result = LossResult(logprobs.new_zeros(()), {})
        for key, value in result.metrics.items():
            # A copy: megatron divides the loss in place afterwards.
            value = torch.as_tensor(value).detach().clone()
            if key in self._metrics:
                before = self._metrics[key]
                value = torch.maximum(before, value) if is_maximum(key) else before + value
            self._metrics[key] = value
        return result.loss if result.loss.requires_grad else result.loss + 0.0 * logprobs.sum()

    def finish(self) -> dict[str, float]:
        """Collective: sums, or maxima, of the metrics. Raises what the function raised, PeerError where another rank's
        did."""
        raise_together(self._error, "loss function")
        return {key: float(value) for key, value in self._metrics.items()}
