"""How far float32 may be from float32: what a model's own rounding explains, measured against float64.

Two right implementations in float32 differ from the exact value by about as much as plain transformers does; from each
other by twice that at most. A stale or wrong weight differs by 1e-3 and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridengine.checkpoint.weights import CheckpointWeights
from hybridengine.report.completions import file_of, read_completions
from tests.e2e.runs import records

#: Keys with which a run leaves what is needed here: every step's responses and the weights that sampled them.
KEPT = ("logging.completions=1", "checkpoint.every=1", "checkpoint.keep=0")


@torch.no_grad()
def own_rounding(model: Any, sequences: list[tuple[list[int], list[int]]]) -> float:
    """Largest |logprob in float32 - logprob in float64| of the response tokens of (prompt, response) pairs."""
    largest = 0.0
    for prompt, response in sequences:
        ids = torch.tensor([prompt + response])
        targets = torch.tensor(response).unsqueeze(-1)
        found = []
        for dtype in (torch.float32, torch.float64):
            logits = model.to(dtype)(ids).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(-1, targets).double())
        largest = max(largest, (found[0] - found[1]).abs().max().item())
    return largest


def check_mismatch(run: Path, model_path: Path) -> None:
    """Every step's largest mismatch is within twice the rounding of the model that sampled, on the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    for record in records(run):
        step = int(record["step"])
        if step == 0:
            continue
        if step > 1:
            checkpoint = run / "checkpoints" / f"step_{step - 1:08d}"
            load(model.float(), CheckpointWeights(checkpoint, model_path))
        rows = read_completions(file_of(run, step))
        pairs = [(tokenizer(row["prompt"])["input_ids"], tokenizer(row["response"])["input_ids"]) for row in rows]
        bound, found = 2 * own_rounding(model, pairs), record["sampling/logp_difference/max"]
        assert 0 < found <= bound, f"step {step}: {found:.2e}, and the model's own rounding explains {bound:.2e}"


@torch.no_grad()
def load(model: Any, weights: CheckpointWeights | Mapping[str, Tensor]) -> None:
    """Canonical parameters into a transformers model, through a state that it loads itself."""
    state = {name: weights[name] for name in (weights.shapes if isinstance(weights, CheckpointWeights) else weights)}
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert all(name == "lm_head.weight" for name in missing), missing
