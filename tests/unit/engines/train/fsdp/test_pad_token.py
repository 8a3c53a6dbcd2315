"""The pad token as real input, as in models that pad with their end token: its embedding learns like any other."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hybridengine.engines.train.batching import build_micro_batch
from hybridengine.engines.train.fsdp.policy import PolicyModel
from hybridengine.engines.train.loading import build_empty, materialise
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.types import Sample
from tests.tiny import make_tiny

PAD = 3


def gradient(path: Path, *, packing: bool) -> torch.Tensor:
    """Of the embedding; loss: the log-probabilities of two sequences, the pad token in prompt and response."""
    model = build_empty(path)
    materialise(model, {id(p): name for name, p in model.named_parameters()}, SafetensorsSource(path))
    samples = [
        Sample(prompt_ids=[5, PAD], response_ids=[7, PAD, 9], loss_mask=[True] * 3, advantages=[1.0] * 3),
        Sample(prompt_ids=[6], response_ids=[8], loss_mask=[True], advantages=[1.0]),
    ]
    micro = build_micro_batch(samples, [0, 1], pad_id=PAD, packing=packing)
    policy = PolicyModel(model, temperature=1.0, chunk_tokens=16)
    policy(micro)[0].sum().backward()
    found = model.get_input_embeddings().weight.grad
    assert found is not None
    return found


def test_its_embedding_has_the_true_gradient(tmp_path: Path) -> None:
    """Equal to transformers' own with ``padding_idx`` off; with it on, as loaded, the pad token's row is missing."""
    path = make_tiny(tmp_path, "llama", pad_token_id=PAD, tie_word_embeddings=False)
    rows = {}
    for padding_idx in (PAD, None):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert model.get_input_embeddings().padding_idx == PAD
        model.get_input_embeddings().padding_idx = padding_idx
        total = torch.zeros(())
        for prompt, response in (([5, PAD], [7, PAD, 9]), ([6], [8])):
            logp = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            first = len(prompt) - 1
            total = total + sum(logp[first + t, token] for t, token in enumerate(response))
        total.backward()
        rows[padding_idx] = model.get_input_embeddings().weight.grad
    assert rows[PAD][PAD].abs().max() == 0 and rows[None][PAD].abs().max() > 1e-4
    for packing in (True, False):
        torch.testing.assert_close(gradient(path, packing=packing), rows[None], rtol=1e-4, atol=1e-6)
