"""Packed attention through PolicyModel: the same log-probabilities and gradients as padded rows, any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.engines.train.fsdp.attention import MAX_PADDING, PackedLayout, group_rows
from hybridengine.engines.train.fsdp.policy import PolicyModel, refuse_unsupported
from hybridengine.types import Sample
from tests.tiny import make_tiny

LENGTHS = {
    "equal": [6, 6, 6],
    "similar": [7, 6, 8, 7],
    "one-long": [3, 30, 4, 2, 3],
    "single": [9],
    "shortest": [2, 2, 11, 2],
}


def samples_of(lengths: list[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        ids = torch.randint(3, 96, (length,), generator=generator).tolist()
        cut = max(1, length // 2)
        n = length - cut
        samples.append(Sample(prompt_ids=ids[:cut], response_ids=ids[cut:], loss_mask=[True] * n, advantages=[1.0] * n))
    return samples


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module", params=["gqa", "mha", "sliding-window"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    changes: dict[str, Any] = {
        "gqa": {},
        "mha": {"num_key_value_heads": 4},
        "sliding-window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    }[request.param]
    path = make_tiny(tmp_path_factory.mktemp(request.param), "qwen2", std=0.2, **changes)
    return PolicyModel(load(path), temperature=0.7, chunk_tokens=1024, with_entropy=True)


def score(policy: PolicyModel, samples: list[Sample], packing: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    micro = build_micro_batch(samples, range(len(samples)), pad_id=0, packing=packing)
    policy.zero_grad()
    logprobs, entropy = policy(micro)
    assert entropy is not None
    (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.1 * entropy).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_equals_padded(policy: PolicyModel, lengths: list[int]) -> None:
    samples = samples_of(lengths)
    packed, packed_grads = score(policy, samples, packing=True)
    padded, padded_grads = score(policy, samples, packing=False)
    torch.testing.assert_close(packed, padded, atol=1e-6, rtol=1e-6)
    assert packed_grads.keys() == padded_grads.keys() and packed_grads
    for name, grad in padded_grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_sequences_do_not_see_each_other(policy: PolicyModel) -> None:
    """Scoring a sequence alone or packed between others gives the same."""
    samples = samples_of(LENGTHS["one-long"])
    together, _ = score(policy, samples, packing=True)
    alone = torch.cat([score(policy, [sample], packing=True)[0] for sample in samples])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [1] * 5, [100, 1, 1, 1, 90, 50]])
def test_groups_cover_everything_with_little_padding(lengths: list[int]) -> None:
    groups = group_rows(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        positions = len(group) * max(lengths[i] for i in group)
        assert sum(lengths[i] for i in group) >= (1 - MAX_PADDING) * positions
    layout = PackedLayout.from_lengths(lengths, torch.device("cpu"))
    assert layout.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert layout.num_tokens == sum(lengths)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_capping_is_refused_by_name(key: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2")
    setattr(config, key, 30.0)
    with pytest.raises(ValueError, match=key):
        refuse_unsupported(config)


def test_temperature_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        PolicyModel(load(make_tiny(tmp_path)), temperature=0.0, chunk_tokens=8)
