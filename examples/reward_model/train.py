"""Train a small reward model on pairs of answers to the embedded task.

    python examples/reward_model/train.py --out outputs/reward_model          # about a minute on two cores

The model starts from the embedded one and gets a head of one number. Each pair is a problem with its right answer and a
wrong one (a carry forgotten, or a digit changed), and the loss is Bradley and Terry's, -log σ(r_right - r_wrong).
Problems that are held out for validation are in no pair; the last line says how often the model is right about those.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from hybridengine.data.arithmetic import add, add_without_carry, problems
from hybridengine.embedded import EOS, ensure_embedded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write, for reward.model.path")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--pairs", type=int, default=64, help="per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    accuracy = train(arguments.out, arguments.steps, arguments.pairs, arguments.lr, arguments.seed)
    print(f"{arguments.out}: right answer above wrong one in {accuracy:.1%} of held-out pairs")


def train(out: Path, steps: int, pairs: int, lr: float, seed: int) -> float:
    """Write the model and its tokenizer to ``out``; returns the share of held-out pairs in the right order."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path, rng = ensure_embedded(), random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    train_problems, held_out = problems(held_out=False), problems(held_out=True)

    def scores(texts: Sequence[str]) -> torch.Tensor:
        batch = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right")
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]

    for step in range(steps):
        right, wrong = zip(*(pair(*rng.choice(train_problems), rng) for _ in range(pairs)), strict=True)
        both = scores([*right, *wrong])
        loss = -functional.logsigmoid(both[:pairs] - both[pairs:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        right, wrong = zip(*(pair(a, b, rng) for a, b in held_out), strict=True)
        accuracy = (scores(right) > scores(wrong)).float().mean().item()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return accuracy


def pair(a: int, b: int, rng: random.Random) -> tuple[str, str]:
    """A problem with its right answer, and with a wrong one: without carry where that is wrong, or a digit changed."""
    right = add(a, b)
    wrong = add_without_carry(a, b)
    if wrong == right or rng.random() < 0.5:
        place = rng.randrange(len(right))
        wrong = right[:place] + rng.choice([d for d in "0123456789" if d != right[place]]) + right[place + 1 :]
    return f"{a}+{b}={right}{EOS}", f"{a}+{b}={wrong}{EOS}"


if __name__ == "__main__":
    main()
