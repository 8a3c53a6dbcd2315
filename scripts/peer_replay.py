"""Writes tests/distributed/trl_replay.json: a few steps of TRL's GRPOTrainer, recorded.

    python scripts/peer_replay.py --trl DIR tests/distributed/trl_replay.json

DIR is where TRL 1.16.0 can be imported from. A tiny random model is trained on the CPU in float32; the file holds, per
variant, each rollout's tokens and rewards, TRL's loss per optimizer step, and a sample of the final weights.
tests/distributed/test_trl_replay.py gives the same rollouts to ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.distributed.test_trl_replay import SAMPLED, make_model, sampled_weights

VARIANTS: dict[str, dict[str, Any]] = {
    "on-policy": {"loss_type": "dapo", "num_iterations": 1},
    "two-passes-with-kl": {"loss_type": "grpo", "num_iterations": 2, "beta": 0.05, "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 1.5},
}
STEPS, PROMPTS, SAMPLES = 6, 4, 4


def tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    characters = [chr(code) for code in range(33, 126)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *characters])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<pad>", pad_token="<pad>", eos_token="<end>")


def reward(completions: list[str], **_: Any) -> list[float]:
    """Share of characters below "P", in eighths."""
    return [round(8 * sum(c < "P" for c in text) / max(len(text), 1)) / 8 for text in completions]


def record(model: Path, keys: dict[str, Any], out: Path) -> dict[str, Any]:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    prompts = [{"prompt": text} for text in ("ab1", "Xyz", "q", "7+8=", "hello", "T", "no", "abcd") * 8]
    config = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=PROMPTS * SAMPLES, gradient_accumulation_steps=1, num_generations=SAMPLES,
        max_completion_length=6, temperature=1.0, learning_rate=2e-3, lr_scheduler_type="constant", weight_decay=0.0,
        optim="adamw_torch_fused", adam_epsilon=1e-6, scale_rewards="none", max_steps=STEPS * keys["num_iterations"],
        seed=5, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True, **keys,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer(),
    )  # fmt: skip
    rollouts: list[dict[str, Any]] = []
    rewards: list[list[float]] = []
    score, calculate = trainer._generate_and_score_completions, trainer._calculate_rewards

    def calculated(*args: Any, **kwargs: Any) -> Any:
        found = calculate(*args, **kwargs)
        rewards.append(found[:, 0].tolist())
        return found

    def scored(inputs: Any) -> Any:
        found = score(inputs)
        rollouts.append(
            {
                "prompts": [
                    r[m.bool()].tolist() for r, m in zip(found["prompt_ids"], found["prompt_mask"], strict=True)
                ],
                "responses": [
                    r[m.bool()].tolist() for r, m in zip(found["completion_ids"], found["completion_mask"], strict=True)
                ],
                "rewards": rewards[-1],
                "advantages": [round(a, 7) for a in found["advantages"].tolist()],
            }
        )
        return found

    trainer._generate_and_score_completions, trainer._calculate_rewards = scored, calculated
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: p.detach().float() for name, p in trainer.model.named_parameters()}
    return {"keys": keys, "rollouts": rollouts, "losses": losses, "weights": sampled_weights(weights)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, required=True, help="where TRL can be imported from")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.trl))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        tokenizer().save_pretrained(model)
        found = {name: record(model, keys, Path(scratch) / name) for name, keys in VARIANTS.items()}
    text = json.dumps({"sampled": SAMPLED, "samples_per_prompt": SAMPLES, "variants": found}, separators=(",", ":"))
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
