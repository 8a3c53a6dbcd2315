"""Packed attention through PolicyModel: the same log-probabilities and gradients as padded rows, any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.engines.train.fsdp import attention
from hybridengine.engines.train.fsdp.attention import MAX_PADDING, PackedLayout, group_rows
from hybridengine.engines.train.fsdp.policy import PolicyModel
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


#: test id -> (model type, configuration). Nemotron and StableLM hand no keyword arguments on to their layers.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("qwen2", {}),
    "mha": ("qwen2", {"num_key_value_heads": 4}),
    "sliding-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "soft-capped": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "sliding_window": 5,
         "query_pre_attn_scalar": 8},
    ),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    arch, changes = MODELS[request.param]
    path = make_tiny(tmp_path_factory.mktemp(request.param), arch, std=0.2, **changes)
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


#: test id -> (model type, configuration): each one's own forward does something to the logits or the scores.
LOGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", {}),
    "soft-caps": MODELS["soft-capped"],
    "cohere-multiplies": ("cohere", {"logit_scale": 0.25}),
    "granite-divides": ("granite", {"logits_scaling": 4.0}),
    "output-bias": ("phi", {}),
}


@pytest.mark.parametrize(("arch", "changes"), LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_log_probabilities_and_gradients_are_those_of_transformers(
    tmp_path: Path, arch: str, changes: dict[str, Any], packing: bool
) -> None:
    """Against the model's own forward, eager, one sequence at a time, with autograd through its whole softmax."""
    path, samples = make_tiny(tmp_path, arch, std=0.2, **changes), samples_of(LENGTHS["one-long"])
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    parts, entropies = [], []
    for sample in samples:
        logits = plain(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0] / 0.7
        rows = logits[len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        parts.append(rows.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1))
        entropies.append(-(rows.exp() * rows).sum(-1))
    expected = torch.cat(parts)
    (expected * torch.linspace(-1, 1, len(expected)) + 0.1 * torch.cat(entropies)).sum().backward()
    policy = PolicyModel(load(path), temperature=0.7, chunk_tokens=7, with_entropy=True)
    found, grads = score(policy, samples, packing)
    torch.testing.assert_close(found, expected.detach(), atol=2e-6, rtol=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            grads[f"model.{name}"], parameter.grad, atol=5e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_scores_are_computed_a_block_of_queries_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-capped attention in blocks of one query is that in one block, gradients too."""
    arch, changes = MODELS["soft-capped"]
    policy = PolicyModel(load(make_tiny(tmp_path, arch, std=0.2, **changes)), temperature=0.7, chunk_tokens=64,
                         with_entropy=True)  # fmt: skip
    samples = samples_of(LENGTHS["similar"])
    whole, grads = score(policy, samples, packing=True)
    monkeypatch.setattr(attention, "EAGER_SCORES", 1)
    blocks, block_grads = score(policy, samples, packing=True)
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(block_grads[name], grad, atol=2e-5, rtol=1e-4)


def test_temperature_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        PolicyModel(load(make_tiny(tmp_path)), temperature=0.0, chunk_tokens=8)
