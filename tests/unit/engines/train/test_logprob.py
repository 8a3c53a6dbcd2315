"""Chunked log-probabilities against log_softmax through autograd, and a hand-computed value."""

from __future__ import annotations

import pytest
import torch

from hybridengine.engines.train.logprob import chunked_logprobs


def test_temperature_example() -> None:
    """logits [2, 1, 0] / 0.5 = [4, 2, 0]: 4 - log(e^4 + e^2 + 1) = -0.1429."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]])
    logprobs, _ = chunked_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert logprobs.item() == pytest.approx(-0.1429, abs=5e-5)


@pytest.mark.parametrize("chunk", [3, 7, 100], ids=["chunks", "ragged", "single"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_values_and_gradients_match_autograd(chunk: int, entropy: bool, bias: bool) -> None:
    torch.manual_seed(0)
    rows, vocabulary, width, temperature = 12, 11, 5, 0.7
    parts = [torch.randn(rows, width), torch.randn(vocabulary, width)] + ([torch.randn(vocabulary)] if bias else [])
    ours = [p.double().requires_grad_() for p in parts]
    theirs = [p.double().requires_grad_() for p in parts]
    targets = torch.randint(vocabulary, (rows,))
    weights = torch.randn(2, rows).double()

    logits = torch.nn.functional.linear(*theirs[:2], theirs[2] if bias else None) / temperature
    log_p = torch.log_softmax(logits, -1)
    expected = log_p.gather(1, targets[:, None]).squeeze(1)
    expected_entropy = -(log_p.exp() * log_p).sum(1)
    loss = (expected * weights[0]).sum() + (expected_entropy * weights[1]).sum() * entropy
    loss.backward()

    found, found_entropy = chunked_logprobs(
        ours[0],
        ours[1],
        targets,
        temperature=temperature,
        bias=ours[2] if bias else None,
        chunk_tokens=chunk,
        with_entropy=entropy,
    )
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)
    total = (found.double() * weights[0]).sum()
    if entropy:
        assert found_entropy is not None
        torch.testing.assert_close(found_entropy, expected_entropy.float(), atol=1e-5, rtol=0)
        total = total + (found_entropy.double() * weights[1]).sum()
    total.backward()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, atol=1e-5, rtol=1e-5)


def test_no_float32_logits_of_the_whole_batch() -> None:
    """With chunks of 8 no tensor of rows x vocabulary elements appears, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, vocabulary, chunk = 64, 101, 8
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (vocabulary,):
                largest = max(largest, out.numel())
            return out

    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    with Watch():
        logprobs, _ = chunked_logprobs(hidden, weight, torch.randint(vocabulary, (rows,)), chunk_tokens=chunk)
        logprobs.sum().backward()
    assert 0 < largest <= chunk * vocabulary


def test_no_positions_still_connect_to_the_graph() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, _ = chunked_logprobs(hidden, weight, torch.empty(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("chunk", [3, 100], ids=["chunks", "single"])
@pytest.mark.parametrize("entropy", [False, True], ids=["logprob", "entropy"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_masked_token_s_hidden_state_may_be_anything(chunk: int, entropy: bool, bad: float) -> None:
    """Loss and all gradients are those without the token, to the bit of a token that is ordinary."""
    torch.manual_seed(0)
    base, targets = torch.randn(8, 5), torch.randint(11, (8,))
    mask = torch.ones(8, dtype=torch.bool)
    mask[4] = False
    outcomes = []
    for value in (0.0, bad):
        hidden = base.clone()
        hidden[4, 2] = value
        hidden.requires_grad_()
        weight = torch.randn(11, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        bias = torch.zeros(11).requires_grad_()
        logprobs, entropies = chunked_logprobs(
            hidden, weight, targets, bias=bias, chunk_tokens=chunk, with_entropy=entropy
        )  # fmt: skip
        loss = torch.where(mask, logprobs, 0.0).sum()
        if entropies is not None:
            loss = loss + 0.1 * torch.where(mask, entropies, 0.0).sum()
        loss.backward()
        outcomes.append((loss.detach(), hidden.grad, weight.grad, bias.grad))
    for expected, found in zip(*outcomes, strict=True):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert (outcomes[1][1][4] == 0).all()


def test_a_token_that_is_trained_on_and_no_number_stays_visible() -> None:
    """It is the optimizer's norm check that has to see it."""
    hidden = torch.full((2, 3), float("nan"), requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    chunked_logprobs(hidden, weight, torch.tensor([0, 1]))[0].sum().backward()
    assert weight.grad is not None and weight.grad.isnan().all()
