"""The quickstart's job through TRL's GRPOTrainer, to compare what is learnt; writes one JSON file.

    .venv-peers/bin/python -m benchmarks.peers.trl_learn --seed 1 --out result.json

The same embedded model, prompts, reward, batch (64 prompts × 8 samples of at most 4 tokens), optimizer and number of
steps, in float32 with Hugging Face generation, one process. The loss is TRL's "dapo", the mean over the batch's tokens
that ours is; the random numbers and the order of the prompts are left to differ. Held-out accuracy is greedy, on the
prompts that our validation has.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, help="default: the quickstart's")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()

    import datasets
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from hybridengine.config.compose import build
    from hybridengine.data.prompts import load_prompts
    from hybridengine.embedded import ensure_embedded

    config = build(["+experiment=quickstart", f"seed={arguments.seed}"])
    model = ensure_embedded()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = load_prompts(config.data, tokenizer, arguments.seed)
    for prompt in prompts.train[:100]:
        assert tokenizer(prompt.text)["input_ids"] == prompt.token_ids, prompt.text
    accuracy: list[tuple[int, float]] = []
    rewards: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [score(text, right) for text, right in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    class Validation(TrainerCallback):
        def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
            accuracy.append((0, validate(kwargs["model"], tokenizer, prompts.validation, config.rollout.max_tokens)))

        def on_step_end(self, _: Any, state: Any, *__: Any, **kwargs: Any) -> None:
            if state.global_step % EVERY == 0 or state.global_step == state.max_steps:
                value = validate(kwargs["model"], tokenizer, prompts.validation, config.rollout.max_tokens)
                accuracy.append((state.global_step, value))

    args = GRPOConfig(
        output_dir=str(arguments.out.parent / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, num_generations=config.rollout.samples_per_prompt,
        per_device_train_batch_size=config.data.prompts_per_step * config.rollout.samples_per_prompt,
        gradient_accumulation_steps=1, max_completion_length=config.rollout.max_tokens, temperature=1.0, beta=0.0,
        num_iterations=1, loss_type="dapo", learning_rate=config.train.lr, lr_scheduler_type="constant",
        weight_decay=0.0, optim="adamw_torch_fused", max_steps=arguments.steps or config.steps, seed=arguments.seed,
        report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts.train]
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=reward, args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Validation()],
    )  # fmt: skip
    trainer.train()
    arguments.out.write_text(json.dumps({"accuracy": accuracy, "reward": rewards}))


def score(response: str, answer: str) -> float:
    from hybridengine.rewards.builtin import BUILTIN

    return float(BUILTIN["exact_match"]("", response, answer))


@torch.no_grad()
def validate(model: Any, tokenizer: Any, prompts: Any, max_tokens: int) -> float:
    """Share of right greedy answers."""
    inputs = tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(score(text, p.answer) for text, p in zip(texts, prompts, strict=True)) / len(prompts)


if __name__ == "__main__":
    main()
