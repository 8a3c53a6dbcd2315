"""What the trainer asks of a training engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hybridengine.platform.base import Mover
from hybridengine.sync.plan.spec import ShardMap
from hybridengine.types import Sample

P = TypeVar("P")


@dataclass(slots=True)
class MicroBatch:
    """Several samples of one forward pass, packed or padded.

    B sequences, N = total real tokens, R = total response tokens.

    Attributes:
        input_ids: int64 [1, N] packed (or [B, S] right-padded).
        position_ids: int64, same shape; restarts at 0 for each sequence.
        sequence_lengths: int32 [B], real tokens per sequence, in order.
        attention_mask: None when packed; bool [B, S] when padded.
        target_index: int64 [R], flat index into input_ids.view(-1) of the position that *predicts* each
            response token (the token before it).
        targets: int64 [R], the response tokens.
        sequence_ids: int64 [R], which sequence (0..B-1) each response token belongs to.
        loss_mask: bool [R].
        advantages: float32 [R].
        rollout_logprobs, old_logprobs, ref_logprobs: float32 [R] or None.
        sample_ids: int64 [B], index of each sequence in the list the micro-batch was built from.
        values, returns: float32 [R] or None; of a critic.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_lengths: torch.Tensor
    attention_mask: torch.Tensor | None
    target_index: torch.Tensor
    targets: torch.Tensor
    sequence_ids: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor | None
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    sample_ids: torch.Tensor
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """bool, in the shape of ``input_ids``: tokens of samples, neither padding nor the stand-in for no sample."""
        if bool((self.sample_ids < 0).all()):
            return torch.zeros_like(self.input_ids, dtype=torch.bool)
        return torch.ones_like(self.input_ids, dtype=torch.bool) if self.attention_mask is None else self.attention_mask

    def without_targets(self) -> MicroBatch:
        """The same tokens, for a pass of which no score is needed: the output projection has nothing to do."""
        return replace(self, target_index=self.target_index[:0], targets=self.targets[:0])


@dataclass(slots=True)
class LossResult:
    """``loss`` is already normalised by the global count, so micro-batch losses add up; metrics are sums."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


#: (logprobs [R], entropy [R] or None, micro-batch) -> LossResult; of a value model (values [R], None, micro-batch)
LossFn = Callable[[torch.Tensor, "torch.Tensor | None", MicroBatch], LossResult]


def policy_or_reference(policy: P, frozen: P | None, *, reference: bool) -> P:
    """The model whose log-probabilities are asked for.

    Raises:
        ValueError: the reference is asked for and was not loaded.
    """
    if not reference:
        return policy
    if frozen is None:
        raise ValueError("log-probabilities of the reference model need algorithm.kl_coef above 0")
    return frozen


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a sampling temperature at which no log-probabilities exist."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need a sampling temperature above 0")


def pad_id_of(config: Any) -> int:
    """The token that pads a batch: the model's own, or 0 where its Hugging Face configuration names none."""
    pad = config.pad_token_id
    return pad if isinstance(pad, int) and pad >= 0 else 0


class TrainEngine(Protocol):
    """One model in its training layout. All methods are collective over the training ranks."""

    @property
    def version(self) -> int:
        """Policy version, +1 per optimizer step."""
        ...

    @property
    def replica(self) -> int:
        """Which of the model's data-parallel replicas this rank belongs to; its ranks are given the same samples."""
        ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def packings(self) -> Sequence[bool]:
        """How it can cut micro-batches: packed (True), in padded rows (False)."""
        ...

    def logprobs(
        self, samples: Sequence[Sample], *, reference: bool = False, packing: bool | None = None
    ) -> list[list[float]]:
        """Per response token log-probabilities of this rank's samples at the sampling temperature.

        ``packing``: one of ``packings`` instead of what is configured.
        """
        ...

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of a value model: per response token, the value of the state before it."""
        ...

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        *,
        collect_logprobs: bool = False,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], list[list[float]] | None]:
        """Accumulate gradients over this rank's samples, cut into micro-batches whose number is agreed.

        ``before_last_backward`` is called once, when no more than one backward pass is to come.
        Returns the loss metrics summed over micro-batches (this rank's share: one rank of each replica has its
        sums, the others zeros), and, when asked, the log-probabilities the forward pass saw, per sample.
        """
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero gradients, version += 1. Returns grad_norm, lr."""
        ...

    def shard_map(self) -> ShardMap:
        """Which slices of which canonical parameters every rank holds."""
        ...

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Tensor name of the shard map -> this rank's local shard (the memory itself, not a copy)."""
        ...

    def memory_holders(self) -> list[torch.Tensor]:
        """Every further tensor object on the shards' memory: a mover of that memory must re-point them too."""
        ...

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradient buffers outlive the optimizer step."""
        ...

    def movers(self, offload_dir: Path | str | None, *, keep_in_place: bool) -> dict[str, Mover]:
        """Movers of its memory between device and host, by owner (see memory/residency.py).

        ``offload_dir``: on a CPU, the directory to offload to. ``keep_in_place``: the shards must keep their memory.
        """
        ...

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: each canonical parameter in full, one at a time, same order on all ranks."""
        ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def export(self, path: Path) -> None:
        """Write a Hugging Face directory (safetensors, config) that transformers and vLLM load."""
        ...
