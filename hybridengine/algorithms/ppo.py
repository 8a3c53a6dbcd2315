"""PPO (arXiv:1707.06347): a critic's values, generalised advantages per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.algorithms.base import Scored
from hybridengine.algorithms.grpo import GRPO
from hybridengine.algorithms.values import explained_variance, generalised_advantages, token_rewards
from hybridengine.config import key
from hybridengine.types import Sample


class PPO(GRPO):
    """The clipped surrogate on GAE (arXiv:1506.02438). The reward is the last token's, a KL penalty each token's."""

    needs_critic = True

    @dataclass(kw_only=True)
    class Options:
        gamma: float = key(1.0, "discount per token")
        lam: float = key(0.95, "GAE's lambda: 1 = returns less values, 0 = one step")
        whiten: bool = key(True, "advantages to mean 0 and variance 1 over the trained tokens of a rollout")

        def __post_init__(self) -> None:
            for name in ("gamma", "lam"):
                if not 0 <= getattr(self, name) <= 1:
                    raise ValueError(f"algorithm.kwargs.{name}={getattr(self, name)}: must be in [0, 1]")

    def assign(self, samples: Sequence[Sample], scored: Scored) -> dict[str, float]:
        config, options = self.config, self.options
        assert scored.values is not None
        kl_coef = config.kl_coef if config.kl_in == "reward" else 0.0
        for i, sample in enumerate(samples):
            reference = None if scored.ref_logprobs is None else scored.ref_logprobs[i]
            mask, values = scored.accepted[i].tolist(), scored.values[i]
            rewards = token_rewards(
                scored.totals[i], mask, logprobs=sample.rollout_logprobs, ref_logprobs=reference, kl_coef=kl_coef,
                estimator=config.kl_estimator, clamp=config.kl_clamp,
            ) if scored.kept[i] else np.zeros(len(mask))  # fmt: skip
            advantages, returns = generalised_advantages(rewards, values, mask, gamma=options.gamma, lam=options.lam)
            sample.values, sample.advantages, sample.returns = values, advantages.tolist(), returns.tolist()
        if options.whiten:
            whiten(samples)
        return explained_variance(samples)


def whiten(samples: Sequence[Sample]) -> None:
    """Advantages less their mean, over their standard deviation (+ 1e-8, as TRL and verl do), by trained tokens."""
    trained = np.array([a for s in samples for a, on in zip(s.advantages, s.loss_mask, strict=True) if on])
    if len(trained) > 1:
        mean, scale = trained.mean(), np.sqrt(trained.var(ddof=1) + 1e-8)
        for sample in samples:
            sample.advantages = ((np.array(sample.advantages) - mean) / scale).tolist()
