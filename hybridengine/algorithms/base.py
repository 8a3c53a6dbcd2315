"""Algorithm: from scored trajectories to samples with advantages, and from these to a loss.

Everything that algorithms share is here. What makes one is its surrogate, the function of ratio and advantage whose
gradient is followed, and where it needs to be, its baseline. ``docs/algorithms.md`` says how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.algorithms.advantages import group_advantages, zero_variance_groups
from hybridengine.algorithms.correction import truncated_importance_weights, truncated_sequence_weights
from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import LossCounts, Surrogate, TokenBatch, aggregate, masked, masked_sum
from hybridengine.algorithms.options import NoOptions, parse_options
from hybridengine.algorithms.rollout_metrics import is_sound, rollout_metrics
from hybridengine.config import AlgorithmConfig, RolloutConfig
from hybridengine.engines.train.base import LossFn, LossResult, MicroBatch
from hybridengine.types import Sample, Trajectory


class Algorithm(ABC):
    """What the trainer asks of an algorithm. Critic-free: an advantage belongs to a response, all its tokens have it.

    Args:
        config: the ``algorithm`` section.

    Attributes:
        Options: dataclass of the algorithm's own keys, given under ``algorithm.kwargs``.
        options: an instance of it.

    Raises:
        ValueError: ``algorithm.kwargs`` that don't fit ``Options``.
    """

    Options: ClassVar[type] = NoOptions

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self.config, self.group_size = config, rollout.samples_per_prompt
        self.options: Any = parse_options(self.Options, config.kwargs, owner=config.fn or config.name)
        self.constant_length = config.constant_length or rollout.max_tokens
        self.needs_reference = config.kl_coef > 0
        self.kl_in_loss = self.needs_reference and config.kl_in == "loss"
        self.needs_entropy = config.entropy_coef != 0

    # -- what an algorithm is made of ----------------------------------------------------------------

    @abstractmethod
    def surrogate(self, batch: TokenBatch) -> Surrogate:
        """The per-token losses whose aggregate is minimised, before correction, KL and entropy."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """One advantage per response; ``group_size`` consecutive ones answer the same prompt."""
        return group_advantages(rewards, self.group_size, self.config.advantage)[0]

    # -- before the update ---------------------------------------------------------------------------

    def plain_samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Tokens and masks only, for scoring; every response token is masked in."""
        return [
            Sample(
                prompt_ids=t.prompt.token_ids,
                response_ids=t.token_ids,
                loss_mask=[True] * len(t.token_ids),
                advantages=[0.0] * len(t.token_ids),
                rollout_logprobs=t.logprobs,
                versions=t.versions,
            )
            for t in trajectories
        ]

    def samples(
        self, trajectories: Sequence[Trajectory], ref_logprobs: Sequence[list[float]] | None = None
    ) -> tuple[list[Sample], dict[str, float]]:
        """Training samples in the order of the trajectories, and the rollout's metrics.

        With ``kl_in=reward`` the baseline sees reward - kl_coef · Σ_t KL_t over the response (Ziegler et al.,
        arXiv:1909.08593). Zero variance is a property of the rewards alone: differing KL penalties don't make
        a group that was scored alike worth training on.

        Args:
            trajectories: scored, ordered by prompt then sample.
            ref_logprobs: per trajectory and response token, when ``needs_reference``.

        Raises:
            ValueError: a trajectory without a reward, incomplete or mixed groups, or ``ref_logprobs`` missing.
        """
        config = self.config
        unscored = [t.prompt.index for t in trajectories if t.reward is None]
        if unscored:
            raise ValueError(f"prompt {unscored[0]} has a response without a reward")
        if self.needs_reference and ref_logprobs is None:
            raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs the reference model's log-probabilities")
        totals = [float(t.reward) for t in trajectories if t.reward is not None]
        flat = zero_variance_groups(totals, self.group_size)
        self._refuse_mixed_groups(trajectories)
        if ref_logprobs is not None and config.kl_in == "reward":
            totals = [
                total - config.kl_coef * _sequence_kl(t.logprobs, ref, config.kl_estimator)
                for total, t, ref in zip(totals, trajectories, ref_logprobs, strict=True)
            ]
        samples = self.plain_samples(trajectories)
        advantages = self.advantages(totals)
        for i, (sample, trajectory) in enumerate(zip(samples, trajectories, strict=True)):
            sample.advantages = [advantages[i]] * len(sample.response_ids)
            left_out = (
                (config.mask_truncated and trajectory.truncated)
                or (config.drop_zero_variance and flat[i // self.group_size])
                or not is_sound(trajectory)
            )
            sample.loss_mask = [not left_out] * len(sample.response_ids)
            if ref_logprobs is not None and self.kl_in_loss:
                sample.ref_logprobs = ref_logprobs[i]
        return samples, rollout_metrics(trajectories, flat, self.group_size)

    def _refuse_mixed_groups(self, trajectories: Sequence[Trajectory]) -> None:
        for start in range(0, len(trajectories), self.group_size):
            found = {t.prompt.index for t in trajectories[start : start + self.group_size]}
            if len(found) > 1:
                raise ValueError(f"samples {start} to {start + self.group_size - 1} mix prompts {sorted(found)}")

    # -- the update ----------------------------------------------------------------------------------

    def loss_fn(self, counts: LossCounts) -> LossFn:
        """The loss of one optimizer step, whose micro-batch shares add up to the step's loss.

        A :class:`LossResult` of it has the same metrics for every micro-batch, a masked-out dummy included:
        ``loss`` is this share, everything else a sum over trained tokens. :meth:`metrics` finishes them.
        """

        def loss(logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch) -> LossResult:
            return self._loss(logprobs, entropy, micro, counts)

        return loss

    def _loss(self, logprobs: Tensor, entropy: Tensor | None, micro: MicroBatch, counts: LossCounts) -> LossResult:
        config, mask = self.config, micro.loss_mask
        batch = self._token_batch(logprobs, micro)
        surrogate = self.surrogate(batch)
        losses = surrogate.losses
        sums = {
            "tokens": mask.sum(),
            **surrogate.sums,
            "approx_kl": masked_sum(kl_estimate(batch.old, batch.logprobs.detach(), "k3"), mask),
        }
        if config.correction in ("tis", "tis_sequence"):
            weights, found = self._correction(batch, micro)
            losses = losses * weights
            sums |= found
        # By configuration, not by what the micro-batch has: every rank must report the same metrics.
        if self.kl_in_loss:
            if micro.ref_logprobs is None:
                raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs the reference model's log-probabilities")
            kl = kl_estimate(batch.logprobs, masked(micro.ref_logprobs, mask), config.kl_estimator)
            losses = losses + config.kl_coef * kl
            sums["kl"] = masked_sum(kl.detach(), mask)
        if entropy is not None:
            losses = losses - config.entropy_coef * masked(entropy, mask)
            sums["entropy"] = masked_sum(entropy.detach(), mask)
        total = aggregate(
            losses,
            mask,
            micro.sequence_ids,
            counts=counts,
            mode=config.loss_aggregation,
            constant_length=self.constant_length,
        )
        return LossResult(total, {"loss": total.detach(), **{name: value.float() for name, value in sums.items()}})

    def _token_batch(self, logprobs: Tensor, micro: MicroBatch) -> TokenBatch:
        # Masked before any exp: 0 · NaN in a backward pass would otherwise reach the gradient.
        logprobs = masked(logprobs, micro.loss_mask)
        old = micro.rollout_logprobs if self.config.old_logprobs == "rollout" else micro.old_logprobs
        return TokenBatch(
            logprobs=logprobs,
            old=logprobs.detach() if old is None else masked(old, micro.loss_mask),
            advantages=micro.advantages,
            mask=micro.loss_mask,
            sequence_ids=micro.sequence_ids,
        )

    def _correction(self, batch: TokenBatch, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [R], and sums for the metrics.

        With recomputed old log-probabilities this is the decoupled objective (arXiv:2505.24298): the clip is
        against the policy before the update, the weight brings the sampling policy to it.
        """
        config, mask = self.config, batch.mask
        if micro.rollout_logprobs is None:
            raise ValueError(f"algorithm.correction={config.correction} needs the rollout's log-probabilities")
        rollout = masked(micro.rollout_logprobs, mask)
        if config.correction == "tis":
            weights = truncated_importance_weights(batch.old, rollout, cap=config.correction_cap)
        else:
            weights = truncated_sequence_weights(
                batch.old, rollout, mask, batch.sequence_ids, cap=config.correction_cap
            )
        return weights, {
            "sampling/importance_weight": masked_sum(weights, mask),
            "sampling/importance_weight_squared": masked_sum(weights.square(), mask),
            "sampling/kl": masked_sum(kl_estimate(rollout, batch.old, "k1"), mask),
        }

    def metrics(self, sums: Sequence[dict[str, float]]) -> dict[str, float]:
        """Collective: this rank's metric sums, one dictionary per optimizer step -> means over the step's tokens.

        ``loss`` is the mean over optimizer steps; everything else is divided by the number of trained tokens.
        """
        names = sorted({name for step in sums for name in step})
        totals = torch.tensor([[step.get(name, 0.0) for name in names] for step in sums], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(totals)
        summed = dict(zip(names, totals.sum(0).tolist(), strict=True))
        tokens = max(summed.pop("tokens"), 1.0)
        found = {"loss": summed.pop("loss") / len(sums)}
        squared = summed.pop("sampling/importance_weight_squared", None)
        if squared:  # Kish's effective sample size, as a fraction of the tokens
            found["sampling/effective_sample_size"] = summed["sampling/importance_weight"] ** 2 / (tokens * squared)
        return found | {name: value / tokens for name, value in summed.items()}


def _sequence_kl(logprobs: Sequence[float], ref_logprobs: Sequence[float], estimator: str) -> float:
    """Σ over a response's tokens of the KL estimate between the sampling policy and the reference."""
    policy, reference = torch.tensor(logprobs, dtype=torch.float64), torch.tensor(ref_logprobs, dtype=torch.float64)
    return kl_estimate(policy, reference, estimator).sum().item()
