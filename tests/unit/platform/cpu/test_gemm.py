"""Matrix products through oneDNN: the same numbers as torch's own, wherever they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hybridengine.engines.train.logprob import chunked_logprobs
from hybridengine.platform.cpu import gemm

SMALL, LARGE = (8, 16, 24), (96, 160, 224)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[False, True], ids=["default", "onednn"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gemm, "uses_onednn", lambda: request.param)
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that went to oneDNN."""
    seen: list[tuple[int, ...]] = []
    original = gemm._onednn

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append((*x.shape, len(weight)))
        return original(x, weight, bias)

    monkeypatch.setattr(gemm, "_onednn", counted)
    return seen


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("transposed", [False, True])
def test_mm_and_add_mm(onednn: bool, calls: list, shape: tuple[int, int, int], transposed: bool) -> None:
    rows, inner, columns = shape
    a = torch.randn(inner, rows).t() if transposed else torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
    expected = (a.double() @ b.double()).float()
    torch.testing.assert_close(gemm.mm(a, b), expected, rtol=1e-5, atol=1e-4)
    for dtype in (torch.float32, torch.float64):
        total = torch.ones(rows, columns, dtype=dtype)
        gemm.add_mm(total, a, b)
        torch.testing.assert_close(total, (expected + 1).to(dtype), rtol=1e-5, atol=1e-4)
    assert len(calls) == (3 if onednn and shape == LARGE else 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(96,), (3, 32), (2, 4, 12)])
def test_gradients_are_those_of_the_plain_layer(onednn: bool, calls: list, bias: bool, shape: tuple[int, ...]) -> None:
    plain, ours = nn.Linear(160, 224, bias=bias), nn.Linear(160, 224, bias=bias)
    ours.load_state_dict(plain.state_dict())
    gemm.accelerate(ours)
    x = torch.randn(*shape, 160)
    results = []
    for layer in (plain, ours):
        given = x.clone().requires_grad_()
        out = layer(given)
        (out * torch.arange(224.0)).sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in layer.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert len(calls) == (3 if onednn else 0)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-4)


def test_what_needs_no_gradient_is_not_computed(calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "uses_onednn", lambda: True)
    x, weight = torch.randn(96, 160), torch.randn(224, 160, requires_grad=True)
    gemm.linear(x, weight).sum().backward()
    assert len(calls) == 2 and x.grad is None


def test_other_precisions_stay_with_torch(onednn: bool, calls: list) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = torch.randn(96, 160, dtype=dtype), torch.randn(224, 160, dtype=dtype)
        assert torch.equal(gemm.linear(x, weight), nn.functional.linear(x, weight))
        assert torch.equal(gemm.mm(x, weight.t()), x @ weight.t())
    assert not calls


def test_subclasses_of_linear_keep_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "uses_onednn", lambda: True)

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.ModuleList([Doubled(160, 224), nn.Linear(160, 224)])
    gemm.accelerate(model)
    x = torch.randn(96, 160)
    torch.testing.assert_close(model[0](x), 2 * nn.functional.linear(x, model[0].weight, model[0].bias))
    assert "forward" not in vars(model[0]) and "forward" in vars(model[1])


def test_logprobs_over_chunks(onednn: bool) -> None:
    hidden, weight = torch.randn(300, 64), torch.randn(500, 64)
    targets = torch.randint(500, (300,))
    found = []
    for chunk in (300, 128):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, _ = chunked_logprobs(h, w, targets, chunk_tokens=chunk)
        logprobs.sum().backward()
        found.append((logprobs.detach(), h.grad, w.grad))
    plain = torch.log_softmax(hidden @ weight.t(), 1).gather(1, targets[:, None])[:, 0]
    for results in found:
        torch.testing.assert_close(results[0], plain, rtol=1e-5, atol=1e-5)
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-4)


def test_vendor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x\n")
    assert gemm.processor_vendor(file) == "AuthenticAMD"
    file.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert gemm.processor_vendor(file) == gemm.processor_vendor(tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str, expected: bool) -> None:
    monkeypatch.setattr(gemm, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert gemm.uses_onednn.__wrapped__() is (expected and torch.backends.mkl.is_available())
