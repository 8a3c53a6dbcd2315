"""Aggregation, KL and importance weights against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from hybridengine.algorithms.kl import kl_estimate
from hybridengine.algorithms.losses import LossCounts, TokenBatch, aggregate, ratio_sums
from hybridengine.types import Sample

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"]


def shares(batches: list[list[list[float]]], mode: str, constant_length: int | None = None) -> float:
    """Sum of the micro-batch shares; ``batches[m][b]`` are the token losses of sequence b."""
    counts = LossCounts(
        tokens=sum(len(s) for batch in batches for s in batch), sequences=sum(len(batch) for batch in batches)
    )
    total = 0.0
    for batch in batches:
        losses = torch.tensor([x for s in batch for x in s])
        ids = torch.repeat_interleave(torch.tensor([len(s) for s in batch]))
        mask = torch.ones_like(losses, dtype=torch.bool)
        total += aggregate(losses, mask, ids, counts=counts, mode=mode, constant_length=constant_length).item()
    return total


def test_unequal_micro_batches_weigh_by_tokens() -> None:
    """(100·2.0 + 900·0.5) / 1000 = 0.65; the mean of the two means would be 1.25."""
    assert shares([[[2.0] * 100], [[0.5] * 900]], "token-mean") == pytest.approx(0.65)


def test_sequence_mean_over_four_ranks_is_one() -> None:
    """32 sequences of loss 1 per token on 4 ranks: 1.0 in total, not 1/16."""
    assert shares([[[1.0] * 5] * 8] * 4, "seq-mean-token-mean") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1.75), ("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 3.5), ("constant-length", 0.875)],
)
def test_aggregation_modes(mode: str, expected: float) -> None:
    """Losses [4] and [1, 1, 1]: 7/4; (4 + 1)/2; (4 + 3)/2; 7/(2·4)."""
    assert shares([[[4.0], [1.0, 1.0, 1.0]]], mode, 4) == pytest.approx(expected)
    assert shares([[[4.0]], [[1.0, 1.0, 1.0]]], mode, 4) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_masked_out_values_may_be_nan(mode: str) -> None:
    losses = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask, ids = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    value = aggregate(losses, mask, ids, counts=LossCounts(2, 2), mode=mode, constant_length=2)
    value.backward()
    assert torch.isfinite(value)
    assert losses.grad is not None and torch.isfinite(losses.grad).all()
    assert losses.grad[1] == 0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_is_zero(mode: str) -> None:
    value = aggregate(
        torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 0]), counts=LossCounts(0, 0), mode=mode,
        constant_length=2,
    )  # fmt: skip
    assert value == 0


def test_unknown_mode_names_the_key() -> None:
    with pytest.raises(ValueError, match="algorithm.loss_aggregation=median"):
        shares([[[1.0]]], "median")


def test_sequences_without_trained_tokens_do_not_count() -> None:
    def sample(mask: list[bool]) -> Sample:
        return Sample(prompt_ids=[1], response_ids=[2] * len(mask), loss_mask=mask, advantages=[0.0] * len(mask))

    samples = [sample([True, True, False]), sample([False, False]), sample([True])]
    assert LossCounts.of(samples) == LossCounts(tokens=3, sequences=2)


def test_kl_estimators_are_right_on_average() -> None:
    """Over samples of a categorical, k1 and k3 average to the exact KL; k2 is d²/2."""
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(5), 0), torch.softmax(torch.randn(5), 0)
    exact = (p * (p / q).log()).sum()
    d = (q / p).log()
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), estimator)).sum() == pytest.approx(exact.item(), rel=1e-5)
    torch.testing.assert_close(kl_estimate(p.log(), q.log(), "k2"), d.square() / 2)
    assert (kl_estimate(p.log(), q.log(), "k3") >= 0).all()
    assert (kl_estimate(p.log(), p.log(), "k3") == 0).all()


def test_tokens_that_a_clip_takes_the_gradient_from() -> None:
    """Ratios 2 (above) and 0.1 (below): above counts where A > 0, below where A < 0, and neither where masked."""
    ratio = torch.tensor([2.0, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1, 2.0, 0.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    mask = torch.tensor([True] * 7 + [False] * 2)
    batch = TokenBatch(ratio.log(), torch.zeros(9), advantages, mask, torch.zeros(9, dtype=torch.int64))
    found = ratio_sums(batch, ratio, low=0.2, high=0.2)
    assert (found["clip_ratio/high"], found["clip_ratio/low"]) == (2, 3)
    assert found["ratio"].item() == pytest.approx(3 * 2.0 + 4 * 0.1)
