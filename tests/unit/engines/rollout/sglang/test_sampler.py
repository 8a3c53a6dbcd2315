"""The sampler we put into SGLang: the distribution, its log-probabilities, seeds."""

from __future__ import annotations

import pytest
import torch

from hybridengine.engines.rollout.sglang.sampler import above_min_p, draw, uniforms
from hybridengine.types import SamplingParams
from tests.engines.subject import distribution


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.8)], ids=str)
def test_tokens_follow_the_truncated_distribution(top_k, top_p):
    """20,000 uniform numbers on a grid hit each token in proportion, to one grid step per edge."""
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(3)) * 2
    n = 20000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    limits = None
    if top_k or top_p < 1:
        limits = torch.full((n,), top_k or 1 << 30), torch.full((n,), top_p)
    token, logprob = draw(logits.expand(n, -1), uniform, limits)
    expected = distribution(logits, SamplingParams(top_k=top_k, top_p=top_p))[0]
    share = torch.bincount(token, minlength=11) / n
    assert (share - expected.exp()).abs().max() < 3 / n
    assert (logprob - expected[token]).abs().max() < 1e-6


def test_what_min_p_leaves():
    """Of probabilities 0.5, 0.3, 0.15, 0.05, min-p 0.2 leaves what is at least 0.1, and 0 leaves everything."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 2).log()
    left = above_min_p(logits, torch.tensor([0.2, 0.0])).isfinite()
    assert left.tolist() == [[True, True, True, False], [True] * 4]


def test_a_number_belongs_to_seed_and_position():
    seeds, positions = torch.tensor([5, 5, 6, 2**62]), torch.tensor([0, 1, 0, 0])
    first = uniforms(seeds, positions)
    assert torch.equal(uniforms(seeds.flip(0), positions.flip(0)), first.flip(0))
    assert len(set(first.tolist())) == 4 and bool(((first >= 0) & (first < 1)).all())
