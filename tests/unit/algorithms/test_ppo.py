"""PPO's advantages, the critic's loss and metrics: hand-worked numbers, TRL's recursion, every cut of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridengine.algorithms.critic import Critic
from hybridengine.algorithms.losses import LossCounts
from hybridengine.algorithms.ppo import PPO
from hybridengine.algorithms.values import explained_variance, generalised_advantages
from hybridengine.config import AlgorithmConfig, CriticConfig, RolloutConfig
from hybridengine.engines.train.batching import build_micro_batch, micro_batch_bins, partition
from hybridengine.types import Prompt, Sample, Trajectory


def trajectory(index: int, reward: float, logprobs: list[float]) -> Trajectory:
    count = len(logprobs)
    return Trajectory(
        prompt=Prompt(index=index, token_ids=[1]), sample_index=0, token_ids=[5] * count, logprobs=logprobs,
        versions=[0] * count, truncated=False, reward=reward,
    )  # fmt: skip


def ppo(**changes: object) -> PPO:
    section = AlgorithmConfig(name="ppo", kl_in="reward", kl_estimator="k1", **changes)  # type: ignore[arg-type]
    return PPO(section, RolloutConfig(samples_per_prompt=1, max_tokens=8))


def test_advantages_and_returns_by_hand() -> None:
    """γ 1, λ .5; the second response has two tokens and reward 0.

    KL .1 per token (k1: log π - log ref) at kl_coef .5 takes .05 from each token. First: r [-.05, -.05, .95],
    v [.1, .2, .3]: δ = [.05, .05, .65], A = [.05 + .5·.375, .05 + .5·.65, .65] = [.2375, .375, .65], returns A + v.
    Second: r [-.05, -.05], v [.2, -.1]: δ = [-.35, .05], A = [-.325, .05].
    """
    subject = ppo(kl_coef=0.5, kwargs={"lam": 0.5, "whiten": False})
    assert subject.needs_critic and subject.needs_reference and not subject.kl_in_loss
    rollout = [trajectory(0, 1.0, [-1.0] * 3), trajectory(1, 0.0, [-1.0] * 2)]
    values = [[0.1, 0.2, 0.3], [0.2, -0.1]]
    samples, metrics = subject.samples(rollout, [[-1.1] * 3, [-1.1] * 2], values=values)
    assert samples[0].advantages == pytest.approx([0.2375, 0.375, 0.65])
    assert samples[0].returns == pytest.approx([0.3375, 0.575, 0.95])
    assert samples[1].advantages == pytest.approx([-0.325, 0.05])
    assert [s.values for s in samples] == values
    assert metrics["critic/values"] == pytest.approx(0.14) and "reward_std" not in metrics


def test_whitened_over_trained_tokens_alone() -> None:
    """An unsound response (a log-probability that is no number) and a truncated one leave mean and deviation alone."""
    subject = ppo(mask_truncated=True)
    rollout = [trajectory(i, float(i % 2), [-1.0] * 3) for i in range(4)]
    rollout += [trajectory(4, 9.0, [math.nan] * 3), trajectory(5, 9.0, [-1.0] * 3)]
    rollout[5].truncated = True
    values = [[0.1 * i, 0.3, 0.5] for i in range(6)]
    samples, _ = subject.samples(rollout, values=values)
    assert [any(s.loss_mask) for s in samples] == [True] * 4 + [False] * 2
    trained = np.array([a for s in samples[:4] for a in s.advantages])
    assert trained.mean() == pytest.approx(0, abs=1e-12) and trained.std(ddof=1) == pytest.approx(1)
    plain, _ = ppo(kwargs={"whiten": False}).samples(rollout[:4], values=values[:4])
    raw = np.array([a for s in plain for a in s.advantages])
    assert trained.tolist() == pytest.approx(((raw - raw.mean()) / raw.std(ddof=1)).tolist(), abs=1e-6)
    assert [s.returns for s in samples[:4]] == [s.returns for s in plain], "returns are not whitened"


def test_without_values_it_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="algorithm.name=ppo needs the critic's values"):
        ppo().samples([trajectory(0, 1.0, [-1.0])])


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_options_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.kwargs.{name}=1.5: must be in \[0, 1\]"):
        ppo(kwargs={name: 1.5})


def test_gae_is_trl_s_recursion() -> None:
    """TRL's PPOTrainer runs over a padded batch from the last column on: the next value is 0 beyond the end, values and
    rewards of padding are 0. For responses that end before the last column it is the same as ours per response."""
    rng = np.random.default_rng(3)
    lengths, gamma, lam = [5, 3, 7, 1], 0.97, 0.9
    mask = np.arange(7)[None] < np.array(lengths)[:, None]
    rewards, values = (np.where(mask, rng.normal(size=(4, 7)), 0.0) for _ in range(2))
    advantages, last = np.zeros((4, 7)), np.zeros(4)
    for t in range(6, -1, -1):
        following = values[:, t + 1] if t < 6 else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        advantages[:, t] = last
    for row, length in enumerate(lengths):
        found, returns = generalised_advantages(
            rewards[row, :length].tolist(), values[row, :length].tolist(), [True] * length, gamma=gamma, lam=lam
        )
        assert found.tolist() == pytest.approx(advantages[row, :length].tolist(), abs=1e-14)
        assert returns.tolist() == pytest.approx((advantages + values)[row, :length].tolist(), abs=1e-14)


def test_explained_variance() -> None:
    """Returns [0, 1, 2], values [0, 1, 1]: 1 - (2/9) / (2/3) = 2/3; a constant explains nothing; the masked token with
    its value far off has no part."""

    def sample(values: list[float], returns: list[float]) -> Sample:
        mask = [True] * 3 + [False]
        return Sample(
            prompt_ids=[1], response_ids=[2] * 4, loss_mask=mask, advantages=[0.0] * 4, values=[*values, 100.0],
            returns=[*returns, 0.0],
        )  # fmt: skip

    assert explained_variance([sample([0, 1, 1], [0, 1, 2])])["critic/explained_variance"] == pytest.approx(2 / 3)
    assert explained_variance([sample([5, 5, 5], [0, 1, 2])])["critic/explained_variance"] == pytest.approx(0)
    assert explained_variance([sample([0, 1, 1], [1, 1, 1])]) == {
        "critic/values": pytest.approx(2 / 3), "critic/returns": 1.0,
    }  # fmt: skip


# -- the critic --------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def critic(**keys: object) -> Critic:
    return Critic(engine=None, config=CriticConfig(**keys))  # type: ignore[arg-type]


def test_the_loss_by_hand(one_rank: None) -> None:
    """V = [1, 1, 7], old .2, clip .2, returns [0, 1], the third masked: mean of .5 and .18; errors 1 and 0; both moved
    by more than the clip; the first one's gradient is that of (V - R)² / 2 over two tokens, the second's is 0."""
    sample = Sample(
        prompt_ids=[1], response_ids=[2] * 3, loss_mask=[True, True, False], advantages=[0.0] * 3, values=[0.2] * 3,
        returns=[0.0, 1.0, 0.0],
    )  # fmt: skip
    subject, micro = critic(clip=0.2), build_micro_batch([sample], [0], pad_id=0, packing=True)
    values = torch.tensor([1.0, 1.0, 7.0], requires_grad=True)
    result = subject.loss_fn(LossCounts.of([sample]))(values, None, micro)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.34) and values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.5, 0.0, 0.0])
    sums = {name: float(value) for name, value in result.metrics.items()}
    found = subject.metrics([sums], {"lr": 0.1})
    assert found == pytest.approx(
        {"critic/loss": 0.34, "critic/error": 0.5, "critic/clip_ratio": 1.0, "critic/lr": 0.1}
    )


def test_the_same_for_every_cut() -> None:
    g = torch.Generator().manual_seed(5)
    samples, rows = [], []
    for i in range(7):
        length = int(torch.randint(1, 6, (1,), generator=g))
        numbers = torch.randn(2, length, generator=g).tolist()
        samples.append(
            Sample(
                prompt_ids=[1] * (1 + i % 3), response_ids=[2] * length, loss_mask=[i != 2] * length,
                advantages=[0.0] * length, values=numbers[0], returns=numbers[1],
            )
        )  # fmt: skip
        rows.append(torch.randn(length, generator=g, dtype=torch.float64))
    loss_fn = critic().loss_fn(LossCounts.of(samples))
    outcomes = []
    for ranks, budget in ((1, 1000), (1, 9), (2, 12), (4, 9)):
        leaves = [row.clone().requires_grad_() for row in rows]
        parts = []
        for share in partition([s.length for s in samples], ranks):
            for part in micro_batch_bins([samples[i].length for i in share], budget):
                indices = [share[k] for k in part]
                micro = build_micro_batch(samples, indices, pad_id=0, packing=True)
                parts.append(loss_fn(torch.cat([leaves[i] for i in indices]), None, micro).loss)
        loss = torch.stack(parts).sum()
        loss.backward()
        outcomes.append((loss.detach(), torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])))
    for loss, gradient in outcomes[1:]:
        torch.testing.assert_close(loss, outcomes[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-12, atol=1e-12)


def test_it_learns_alone_in_its_warm_up() -> None:
    assert [critic(warmup_steps=2).in_warmup(step) for step in range(4)] == [True, True, False, False]
