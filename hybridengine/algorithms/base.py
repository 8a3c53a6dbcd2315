"""Algorithm: from scored trajectories to samples with advantages, and from these to a loss.

Everything that algorithms share is here. What makes one is its surrogate, the function of ratio and advantage whose
gradient is followed, and where it needs to be, its baseline. ``docs/algorithms.md`` says how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.algorithms.advantages import Rewards, Table, baseline_of, group_advantages
from hybridengine.algorithms.correction import (
    accepted_tokens,
    correction_of,
    finish_metrics,
    importance_weights,
    log_weights,
    weight_sums,
)
from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import (
    LossCounts,
    Surrogate,
    TokenBatch,
    aggregate,
    masked,
    masked_max,
    masked_sum,
    token_ratio,
)
from hybridengine.algorithms.options import NoOptions, parse_options
from hybridengine.algorithms.overlong import overlong_penalty
from hybridengine.algorithms.rollout_metrics import is_sound, rollout_metrics
from hybridengine.config import AlgorithmConfig, RolloutConfig
from hybridengine.engines.train.base import LossFn, LossResult, MicroBatch
from hybridengine.engines.train.losses import is_maximum
from hybridengine.types import Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A scored rollout as advantages are made from it: per trajectory, ordered by prompt then sample.

    Attributes:
        totals: rewards less penalties.
        accepted: bool [tokens] each: which may be trained on.
        kept: any of them may.
        ref_logprobs, values: [tokens] each, of the reference and of the critic, where there is one.
        greedy: one reward per prompt, where the baseline needs it.
    """

    totals: Sequence[float]
    accepted: Sequence[np.ndarray]
    kept: Sequence[bool]
    ref_logprobs: Sequence[list[float]] | None = None
    values: Sequence[list[float]] | None = None
    greedy: Sequence[float] | None = None


class Algorithm(ABC):
    """What the trainer asks of an algorithm. Without a critic an advantage belongs to a whole response.

    Args:
        config: the ``algorithm`` section; an undecided ``correction.preset=auto`` means none.

    Attributes:
        Options: dataclass of the algorithm's own keys, given under ``algorithm.kwargs``.
        options: an instance of it.
        needs_reference, needs_entropy: :meth:`samples` or the loss use them.
        needs_old_logprobs: the trainer scores the rollout before the advantages. Otherwise a rollout has one optimizer
            step, whose own forward pass is the ratio's denominator.
        needs_greedy: the baseline compares with a greedy sample of each prompt.
        needs_critic: advantages are per token, from the values of a second model.

    Raises:
        ValueError: ``algorithm.kwargs`` that don't fit ``Options``, an unknown baseline or correction.
    """

    Options: ClassVar[type] = NoOptions
    needs_critic: ClassVar[bool] = False

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self.config, self.group_size, self.max_tokens = config, rollout.samples_per_prompt, rollout.max_tokens
        self.options: Any = parse_options(self.Options, config.kwargs, owner=config.fn or config.name)
        self.correction = correction_of(config.correction)
        self.constant_length = config.constant_length or rollout.max_tokens
        self.needs_reference = config.kl_coef > 0
        self.kl_in_loss = self.needs_reference and config.kl_in == "loss"
        self.needs_entropy = config.entropy_coef != 0
        self.needs_greedy = baseline_of(config.advantage).needs_greedy
        several = config.epochs * config.mini_batches > 1 or self.correction.reject != "none"
        self.needs_old_logprobs = config.old_logprobs == "recompute" or (config.old_logprobs == "auto" and several)

    # -- what an algorithm is made of ----------------------------------------------------------------

    @abstractmethod
    def surrogate(self, batch: TokenBatch) -> Surrogate:
        """The per-token losses whose aggregate is minimised, before correction, KL and entropy."""

    def advantages(self, rewards: Rewards) -> Table:
        """One advantage per response, [G, n]; 0 where a sample is not kept."""
        return group_advantages(rewards, self.config.advantage)

    def assign(self, samples: Sequence[Sample], scored: Scored) -> dict[str, float]:
        """Write the samples' advantages, whose loss masks are known by now; returns metrics. The same on every rank."""
        rewards = Rewards.of(scored.totals, self.group_size, kept=scored.kept, greedy=scored.greedy)
        for sample, advantage in zip(samples, self.advantages(rewards).ravel(), strict=True):
            sample.advantages = [float(advantage)] * len(sample.response_ids)
        return {}

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
        self,
        trajectories: Sequence[Trajectory],
        ref_logprobs: Sequence[list[float]] | None = None,
        *,
        old_logprobs: Sequence[list[float]] | None = None,
        greedy_rewards: Sequence[float] | None = None,
        values: Sequence[list[float]] | None = None,
    ) -> tuple[list[Sample], dict[str, float]]:
        """Training samples in the order of the trajectories, and the rollout's metrics.

        Unsound samples, and those that the correction rejects, leave the loss, its count and the baseline. Zero
        variance is a property of the rewards alone: neither overlong nor KL penalties make a group that was scored
        alike worth training on.

        Args:
            trajectories: scored, ordered by prompt then sample.
            ref_logprobs: per trajectory and response token, when ``needs_reference``.
            old_logprobs: likewise, of the policy before the rollout's first update, when ``needs_old_logprobs``.
            greedy_rewards: one per prompt, when ``needs_greedy``.
            values: per trajectory and response token, of the state before it, when ``needs_critic``.

        Raises:
            ValueError: a trajectory without a reward, incomplete or mixed groups, or one of these missing.
        """
        config = self.config
        self._check(trajectories, ref_logprobs, old_logprobs)
        if self.needs_critic and values is None:
            raise ValueError(f"algorithm.name={config.name} needs the critic's values")
        accepted = self._accepted(trajectories, old_logprobs)
        kept = [bool(tokens.any()) for tokens in accepted]
        scored = Rewards.of([float(t.reward or 0.0) for t in trajectories], self.group_size, kept=kept)
        samples = self.plain_samples(trajectories)
        for i, (sample, trajectory) in enumerate(zip(samples, trajectories, strict=True)):
            left_out = (config.mask_truncated and trajectory.truncated) or (
                config.drop_zero_variance and bool(scored.flat[i // self.group_size])
            )
            sample.loss_mask = [False] * len(accepted[i]) if left_out else accepted[i].tolist()
            if old_logprobs is not None:
                sample.old_logprobs = old_logprobs[i]
            if ref_logprobs is not None and self.kl_in_loss:
                sample.ref_logprobs = ref_logprobs[i]
        found = self.assign(
            samples,
            Scored(
                totals=self._totals(trajectories, ref_logprobs),
                accepted=accepted,
                kept=kept,
                ref_logprobs=ref_logprobs,
                greedy=greedy_rewards,
                values=values,
            ),
        )
        metrics = rollout_metrics(trajectories, scored, greedy_rewards)
        return samples, metrics | found | self._rejection_metrics(trajectories, accepted)

    def _check(
        self,
        trajectories: Sequence[Trajectory],
        ref_logprobs: Sequence[list[float]] | None,
        old_logprobs: Sequence[list[float]] | None,
    ) -> None:
        size = self.group_size
        unscored = [t.prompt.index for t in trajectories if t.reward is None]
        if unscored:
            raise ValueError(f"prompt {unscored[0]} has a response without a reward")
        if self.needs_reference and ref_logprobs is None:
            raise ValueError(f"algorithm.kl_coef={self.config.kl_coef} needs the reference model's log-probabilities")
        if self.correction.reject != "none" and old_logprobs is None:
            raise ValueError(f"algorithm.correction.reject={self.correction.reject} needs the trainer's scores first")
        if len(trajectories) % size:
            raise ValueError(f"{len(trajectories)} samples are no whole number of groups of {size}")
        for start in range(0, len(trajectories), size):
            found = {t.prompt.index for t in trajectories[start : start + size]}
            if len(found) > 1:
                raise ValueError(f"samples {start} to {start + size - 1} mix prompts {sorted(found)}")

    def _accepted(
        self, trajectories: Sequence[Trajectory], old_logprobs: Sequence[list[float]] | None
    ) -> list[np.ndarray]:
        """Per trajectory, which of its tokens may be trained on."""
        found = []
        for i, trajectory in enumerate(trajectories):
            if not is_sound(trajectory):
                found.append(np.zeros(len(trajectory.token_ids), dtype=bool))
            elif old_logprobs is None:
                found.append(np.ones(len(trajectory.token_ids), dtype=bool))
            else:
                found.append(accepted_tokens(self.correction, old_logprobs[i], trajectory.logprobs))
        return found

    def _totals(self, trajectories: Sequence[Trajectory], ref_logprobs: Sequence[list[float]] | None) -> list[float]:
        """What the baseline sees: the reward, less the overlong penalty and, with ``kl_in=reward``, less
        kl_coef · Σ_t KL_t over the response (Ziegler et al., arXiv:1909.08593). With a critic it stays per token."""
        config = self.config
        totals = [float(t.reward or 0.0) for t in trajectories]
        if config.overlong_buffer is not None:
            buffer, factor = config.overlong_buffer, config.overlong_penalty
            for i, t in enumerate(trajectories):
                totals[i] += factor * overlong_penalty(len(t.token_ids), limit=self.max_tokens, buffer=buffer)
        if ref_logprobs is not None and config.kl_in == "reward" and not self.needs_critic:
            for i, (t, ref) in enumerate(zip(trajectories, ref_logprobs, strict=True)):
                policy, reference = (torch.tensor(row, dtype=torch.float64) for row in (t.logprobs, ref))
                kl = kl_estimate(policy, reference, config.kl_estimator, clamp=config.kl_clamp)
                totals[i] -= config.kl_coef * kl.sum().item()
        return totals

    def _rejection_metrics(
        self, trajectories: Sequence[Trajectory], accepted: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Shares of what rejection looked at: tokens and sequences of sound samples."""
        if self.correction.reject == "none":
            return {}
        judged = [tokens for tokens, t in zip(accepted, trajectories, strict=True) if is_sound(t)]
        tokens = max(sum(map(len, judged)), 1)
        return {
            "sampling/rejected_tokens": 1 - sum(int(row.sum()) for row in judged) / tokens if judged else 0.0,
            "sampling/rejected_sequences": sum(not row.any() for row in judged) / max(len(judged), 1),
        }

    # -- the update ----------------------------------------------------------------------------------

    def loss_fn(self, counts: LossCounts) -> LossFn:
        """The loss of one optimizer step, whose micro-batch shares add up to the step's loss.

        A :class:`LossResult` of it has the same metrics for every micro-batch, a masked-out dummy included:
        ``loss`` is this share, what ends in ``_max`` a maximum, everything else a sum over trained tokens.
        :meth:`metrics` finishes them.
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
        if self.correction.weight != "none":
            weights, found = self._weights(batch, micro)
            losses = losses * weights
            sums |= found
        # By configuration, not by what the micro-batch has: every rank must report the same metrics.
        if self.kl_in_loss:
            kl = self._kl(batch, micro)
            losses = losses + config.kl_coef * kl
            sums |= {"kl": masked_sum(kl.detach(), mask), "kl_max": masked_max(kl.detach(), mask)}
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

    def _weights(self, batch: TokenBatch, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Importance weights [R], and sums for the metrics.

        With recomputed old log-probabilities this is the decoupled objective (arXiv:2505.24298): the clip is
        against the policy before the update, the weight brings the sampling policy to it.
        """
        if micro.rollout_logprobs is None:
            raise ValueError(
                f"algorithm.correction.weight={self.correction.weight} needs the rollout's log-probabilities"
            )
        difference = batch.old - masked(micro.rollout_logprobs, batch.mask)
        logs = log_weights(difference, batch.mask, batch.sequence_ids, self.correction.weight)
        weights = importance_weights(self.correction, logs)
        return weights, weight_sums(self.correction, logs, weights, difference, batch.mask)

    def _kl(self, batch: TokenBatch, micro: MicroBatch) -> Tensor:
        config = self.config
        if micro.ref_logprobs is None:
            raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs the reference model's log-probabilities")
        reference = masked(micro.ref_logprobs, batch.mask)
        ratio = token_ratio(batch) if config.kl_estimator == "k3_ratio" else None
        return kl_estimate(batch.logprobs, reference, config.kl_estimator, ratio=ratio, clamp=config.kl_clamp)

    def metrics(self, sums: Sequence[dict[str, float]]) -> dict[str, float]:
        """Collective: this rank's metric sums, one dictionary per optimizer step -> means over the step's tokens.

        ``loss`` is the mean over optimizer steps, a maximum stays one; everything else is divided by the number of
        trained tokens.
        """
        if not sums:
            return {}
        names = sorted({name for step in sums for name in step})
        totals = _reduced(sums, [name for name in names if not is_maximum(name)], dist.ReduceOp.SUM)
        largest = _reduced(sums, [name for name in names if is_maximum(name)], dist.ReduceOp.MAX)
        tokens = max(totals.pop("tokens"), 1.0)
        found = {"loss": totals.pop("loss") / len(sums)} | finish_metrics(totals, tokens) | largest
        return found | {name: value / tokens for name, value in totals.items()}


def _reduced(sums: Sequence[dict[str, float]], names: Sequence[str], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    """Over all ranks and optimizer steps."""
    if not names:
        return {}
    table = torch.tensor([[step.get(name, 0.0) for name in names] for step in sums], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(table, op=op)
    over_steps = table.amax(0) if op == dist.ReduceOp.MAX else table.sum(0)
    return dict(zip(names, over_steps.tolist(), strict=True))
