"""The transformers engine's sampler: the right distribution, row by row, at the edges too."""

from __future__ import annotations

import math

import pytest
import torch

from hybridengine.engines.rollout.transformers.engine import sample
from hybridengine.types import SamplingParams

PROBABILITIES = [0.05, 0.4, 0.0, 0.25, 0.2, 0.1]
LOGITS = torch.tensor([PROBABILITIES]).log() + 3.0  # unnormalised on purpose
#: Midpoints of a fine grid of [0, 1): each token's share of them is its probability, within 1 / GRID.
GRID = 4000
UNIFORM = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID

#: settings -> what is left of PROBABILITIES by hand, before dividing by its sum
CASES = {
    "plain": ({}, [0.05, 0.4, 0, 0.25, 0.2, 0.1]),
    "temperature-half-squares": ({"temperature": 0.5}, [p**2 for p in PROBABILITIES]),
    "top-k-3": ({"top_k": 3}, [0, 0.4, 0, 0.25, 0.2, 0]),
    "top-k-1": ({"top_k": 1}, [0, 0.4, 0, 0, 0, 0]),
    "top-k-beyond-the-vocabulary": ({"top_k": 100}, PROBABILITIES),
    "top-p-0.5-cuts-after-it-is-reached": ({"top_p": 0.5}, [0, 0.4, 0, 0.25, 0, 0]),
    "top-p-0.8": ({"top_p": 0.8}, [0, 0.4, 0, 0.25, 0.2, 0]),
    "top-p-tiny-keeps-one": ({"top_p": 1e-6}, [0, 0.4, 0, 0, 0, 0]),
    "top-p-of-what-top-k-left": ({"top_k": 3, "top_p": 0.7}, [0, 0.4, 0, 0.25, 0, 0]),
    "min-p-of-the-likeliest": ({"min_p": 0.5}, [0, 0.4, 0, 0.25, 0.2, 0]),
    "min-p-after-temperature": ({"temperature": 0.5, "min_p": 0.5}, [0, 0.4**2, 0, 0, 0, 0]),
    "min-p-before-top-p": ({"min_p": 0.6, "top_p": 0.6}, [0, 0.4, 0, 0, 0, 0]),
    "temperature-before-top-p": ({"temperature": 0.5, "top_p": 0.8}, [0, 0.4**2, 0, 0.25**2, 0, 0]),
}


@pytest.mark.parametrize(("settings", "left"), CASES.values(), ids=CASES)
def test_distribution_and_logprobs(settings: dict, left: list[float]) -> None:
    expected = torch.tensor(left, dtype=torch.float64) / sum(left)
    token, logprob = sample(LOGITS.expand(GRID, -1), UNIFORM, SamplingParams(**settings))
    share = torch.bincount(token, minlength=len(left)) / GRID
    assert (share - expected).abs().max() <= 1.5 / GRID
    torch.testing.assert_close(logprob.double(), expected.log()[token], rtol=0, atol=1e-6)


def test_random_numbers_give_the_distribution() -> None:
    """Pearson's statistic of 20,000 draws, 4 degrees of freedom: above 33 once in a million times."""
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    token, _ = sample(LOGITS.expand(20_000, -1), uniform, SamplingParams())
    observed = torch.bincount(token, minlength=6)
    expected = torch.tensor(PROBABILITIES, dtype=torch.float64) * 20_000
    drawn = expected > 0
    assert observed[~drawn].sum() == 0
    assert ((observed - expected)[drawn] ** 2 / expected[drawn]).sum() < 33


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}], ids=["plain", "top-k", "top-p"])
def test_a_row_does_not_depend_on_the_others(settings: dict) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 50, generator=generator) * 3
    uniform = torch.rand(8, dtype=torch.float64, generator=generator)
    together = sample(logits, uniform, SamplingParams(**settings))
    for row in reversed(range(8)):
        alone = sample(logits[row : row + 1], uniform[row : row + 1], SamplingParams(**settings))
        assert together[0][row] == alone[0][0] and together[1][row] == alone[1][0]


def test_greedy_logprob_is_of_the_untempered_distribution() -> None:
    token, logprob = sample(torch.tensor([[2.0, 1.0, 0.0]]), None, SamplingParams(temperature=0.0))
    assert token.item() == 0
    assert logprob.item() == pytest.approx(2 - math.log(math.exp(2) + math.exp(1) + 1), abs=1e-6)


def test_temperature_half() -> None:
    """Logits [2, 1, 0] at temperature 0.5: log softmax([4, 2, 0])[0] = -0.1429."""
    _, logprob = sample(torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1).double(), SamplingParams(temperature=0.5))
    assert logprob.item() == pytest.approx(-0.1429, abs=1e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53], ids=["lowest", "highest"])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=["plain", "top-k", "top-p"])
def test_extreme_random_numbers_draw_a_possible_token(uniform: float, settings: dict) -> None:
    """The first and last tokens of the vocabulary are impossible; so must be drawing them."""
    logits = torch.tensor([[-math.inf, 1.0, 2.0, 0.5, -math.inf]])
    _, logprob = sample(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams(**settings))
    assert logprob.item() > -10


def test_a_large_vocabulary() -> None:
    """152,064 tokens: float32 sums over the vocabulary must not move the cut or the draw."""
    logits = torch.randn(4, 152_064, generator=torch.Generator().manual_seed(3)) * 2
    uniform = torch.tensor([0.0, 0.3, 0.9, 1 - 2**-53], dtype=torch.float64)
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        token, logprob = sample(logits, uniform, params)
        probs = logits.double().softmax(-1)
        ordered, order = probs.sort(dim=-1, descending=True)
        inside = ordered.cumsum(-1) - ordered < params.top_p
        mass = (ordered * inside).sum(-1)
        chosen = probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(logprob.double(), (chosen / mass).log(), rtol=0, atol=1e-5)
