"""GRPO and its relatives: group baseline, clipped surrogate, optional KL, no critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.algorithms.advantages import group_advantages, zero_variance_groups
from hybridengine.algorithms.correction import truncated_importance_weights, truncated_sequence_weights
from hybridengine.algorithms.functional import LossCounts, aggregate, kl_estimate, masked, masked_sum
from hybridengine.config import AlgorithmConfig, RolloutConfig
from hybridengine.engines.train.base import LossFn, LossResult, MicroBatch
from hybridengine.types import Sample, Trajectory


class GRPO:
    """Trajectories -> samples with advantages -> loss (arXiv:2402.03300; variants by configuration)."""

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self.config, self.group_size = config, rollout.samples_per_prompt
        self.constant_length = config.constant_length or rollout.max_tokens
        self.needs_reference = config.kl_coef > 0
        self.kl_in_loss = self.needs_reference and config.kl_in == "loss"
        self.needs_entropy = config.entropy_coef != 0

    # -- before the update -------------------------------------------------------------------------

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
        for start in range(0, len(trajectories), self.group_size):
            found = {t.prompt.index for t in trajectories[start : start + self.group_size]}
            if len(found) > 1:
                raise ValueError(f"samples {start} to {start + self.group_size - 1} mix prompts {sorted(found)}")
        if ref_logprobs is not None and config.kl_in == "reward":
            totals = [
                total - config.kl_coef * _sequence_kl(t.logprobs, ref, config.kl_estimator)
                for total, t, ref in zip(totals, trajectories, ref_logprobs, strict=True)
            ]
        advantages, _ = group_advantages(totals, self.group_size, config.advantage)
        samples = self.plain_samples(trajectories)
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
        return samples, self._rollout_metrics(trajectories, flat)

    def _rollout_metrics(self, trajectories: Sequence[Trajectory], flat: Sequence[bool]) -> dict[str, float]:
        count = len(trajectories)
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        lengths = [len(t.token_ids) for t in trajectories]
        names = sorted(set(chain.from_iterable(t.rewards for t in trajectories)))
        metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.view(-1, self.group_size).std(dim=1).mean().item(),
            "frac_reward_zero_std": sum(flat) / len(flat),
            "completions/mean_length": sum(lengths) / count,
            "completions/min_length": float(min(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/unsound": float(sum(not is_sound(t) for t in trajectories)),
            "completions/clipped_ratio": sum(t.truncated for t in trajectories) / count,
        }
        for name in names:
            values = [t.rewards[name] for t in trajectories if name in t.rewards]
            metrics[f"rewards/{name}"] = sum(values) / len(values)
        return metrics

    # -- the update --------------------------------------------------------------------------------

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
        # Masked before any exp: 0 · NaN in a backward pass would otherwise reach the gradient.
        logprobs = masked(logprobs, mask)
        old = micro.rollout_logprobs if config.old_logprobs == "rollout" else micro.old_logprobs
        old = logprobs.detach() if old is None else masked(old, mask)
        ratio = (logprobs - old).clamp(-20.0, 20.0).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        losses = torch.maximum(-micro.advantages * ratio, -micro.advantages * clipped)
        if config.clip_dual:
            bound = -micro.advantages * config.clip_dual
            losses = torch.where(micro.advantages < 0, torch.minimum(losses, bound), losses)
        sums = {
            "tokens": mask.sum(),
            "ratio": masked_sum(ratio.detach(), mask),
            "clip_ratio/low": (mask & (ratio < 1 - config.clip_low) & (micro.advantages < 0)).sum(),
            "clip_ratio/high": (mask & (ratio > 1 + config.clip_high) & (micro.advantages > 0)).sum(),
            "approx_kl": masked_sum(kl_estimate(old, logprobs.detach(), "k3"), mask),
        }
        if config.correction in ("tis", "tis_sequence"):
            # With recomputed old log-probabilities this is the decoupled objective (arXiv:2505.24298): the clip is
            # against the policy before the update, the weight brings the sampling policy to it.
            if micro.rollout_logprobs is None:
                raise ValueError(f"algorithm.correction={config.correction} needs the rollout's log-probabilities")
            rollout = masked(micro.rollout_logprobs, mask)
            if config.correction == "tis":
                weights = truncated_importance_weights(old, rollout, cap=config.correction_cap)
            else:
                weights = truncated_sequence_weights(old, rollout, mask, micro.sequence_ids, cap=config.correction_cap)
            losses = losses * weights
            sums["sampling/importance_weight"] = masked_sum(weights, mask)
            sums["sampling/importance_weight_squared"] = masked_sum(weights.square(), mask)
            sums["sampling/kl"] = masked_sum(kl_estimate(rollout, old, "k1"), mask)
        # By configuration, not by what the micro-batch has: every rank must report the same metrics.
        if self.kl_in_loss:
            if micro.ref_logprobs is None:
                raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs the reference model's log-probabilities")
            kl = kl_estimate(logprobs, masked(micro.ref_logprobs, mask), config.kl_estimator)
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


def is_sound(trajectory: Trajectory) -> bool:
    """Whether every log-probability is a number: what an engine drew from NaN logits is not trained on."""
    return all(map(math.isfinite, trajectory.logprobs))


def _sequence_kl(logprobs: Sequence[float], ref_logprobs: Sequence[float], estimator: str) -> float:
    """Σ over a response's tokens of the KL estimate between the sampling policy and the reference."""
    return (
        kl_estimate(
            torch.tensor(logprobs, dtype=torch.float64), torch.tensor(ref_logprobs, dtype=torch.float64), estimator
        )
        .sum()
        .item()
    )
