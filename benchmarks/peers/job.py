"""What every arm of the end-to-end benchmark trains: model, prompts, reward and sizes.

A job is made so that each arm does the same work whatever it samples:

* **Equal lengths.** The end-of-sequence token is one the model has no logit for (its id is the vocabulary
  size), so no arm can sample it and every response runs to ``max_tokens``. No engine needs a flag for that,
  and the sampled distribution is that of the plain model. Prompts all have the same number of tokens, so
  padding costs nobody anything.
* **A gradient in every step.** The reward is a checksum of the text: free, and different within each group.
* **Weights don't matter for the time,** so they are random; ``smollm2`` has the shape of SmolLM2-135M.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD = "<pad>"
EOS = "<never>"  # its id is the model's vocabulary size: it can't be sampled
CHARACTERS = [chr(code) for code in range(33, 127)]
NUM_PROMPTS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step: ``prompts × samples`` responses of exactly ``max_tokens`` tokens, then one AdamW step.

    Attributes:
        tp: tensor-parallel size of vLLM, in every arm that has it.
        prompt_tokens: length of every prompt.
        steps: timed steps of one round.
        warmup_steps: steps before them, left out (first-call compilation, allocator, optimizer state).
        trl_eager: TRL's vLLM without torch.compile. TRL leaves vLLM's default, compiled, and that is the faster for
            SmolLM2; for the tiny model it is the slower, so it is not held against TRL.
        architecture: transformers configuration class and its arguments.
    """

    name: str
    prompts: int
    samples: int
    prompt_tokens: int
    max_tokens: int
    tp: int
    steps: int
    warmup_steps: int
    trl_eager: bool
    architecture: tuple[str, dict[str, Any]]
    learning_rate: float = 1e-5
    world_size: int = 2
    seed: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens_per_step(self) -> int:
        """Prompt and response tokens of one step, over all ranks."""
        return self.sequences * (self.prompt_tokens + self.max_tokens)

    @property
    def vocab_size(self) -> int:
        return int(self.architecture[1]["vocab_size"])


TINY = Job(
    name="tiny",
    prompts=8,
    samples=8,
    prompt_tokens=8,
    max_tokens=32,
    tp=2,
    steps=20,
    warmup_steps=6,
    trl_eager=True,
    architecture=(
        "Qwen2Config",
        dict(
            vocab_size=96, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        ),
    ),
)  # fmt: skip

SMOLLM2 = Job(
    name="smollm2",
    prompts=4,
    samples=4,
    prompt_tokens=16,
    max_tokens=48,
    tp=1,
    steps=2,
    warmup_steps=1,
    trl_eager=False,
    architecture=(
        "LlamaConfig",
        dict(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, rope_theta=100000.0, tie_word_embeddings=True,
        ),
    ),
)  # fmt: skip

JOBS = {job.name: job for job in (TINY, SMOLLM2)}


def reward(completion: str) -> float:
    """A checksum of the text in [0, 1): costs nothing, and no group has equal rewards."""
    return (zlib.crc32(completion.encode()) % 1000) / 1000


def our_reward(prompt: str, response: str, answer: object, **_: Any) -> float:
    """:func:`reward` as hybridengine calls it."""
    return reward(response)


def trl_reward(completions: list[str], **_: Any) -> list[float]:
    """:func:`reward` as TRL calls it."""
    return [reward(completion) for completion in completions]


def prepare(job: Job, directory: Path) -> tuple[Path, Path]:
    """Model directory and prompts (JSONL) of the job under ``directory``, made where they are not there yet."""
    target = directory / f"{job.name}-{zlib.crc32(repr((job, NUM_PROMPTS)).encode()):08x}"
    model, data = target / "model", target / "prompts.jsonl"
    if not data.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / "job"
            _write_model(job, made / "model")
            _write_prompts(job, made / "prompts.jsonl")
            try:
                made.rename(target)  # whole or not at all
            except OSError:
                if not data.is_file():  # not another rank that was faster
                    raise
    return model, data


def _write_model(job: Job, out: Path) -> None:
    import torch
    import transformers

    kind, arguments = job.architecture
    config = getattr(transformers, kind)(
        **arguments, pad_token_id=0, bos_token_id=None, eos_token_id=None, dtype="float32"
    )
    torch.manual_seed(job.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=job.vocab_size)
    model.save_pretrained(out)
    _tokenizer(job.vocab_size).save_pretrained(out)


def _tokenizer(vocab_size: int) -> Any:
    """One token per printable ASCII character, fillers up to the vocabulary size, then the end token.

    Qwen2's class, because transformers loads every Qwen2 checkpoint with it whatever tokenizer was saved there.
    """
    from transformers import Qwen2Tokenizer

    characters = [*CHARACTERS, "\u0120"]  # the last is how byte-level BPE writes a space
    fillers = [f"f{i}" for i in range(len(characters) + 1, vocab_size)]
    vocabulary = {token: i for i, token in enumerate([PAD, *characters, *fillers, EOS])}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def _write_prompts(job: Job, path: Path) -> None:
    rng = random.Random(job.seed)
    prompts = (
        "".join(rng.choices(string.ascii_letters + string.digits, k=job.prompt_tokens)) for _ in range(NUM_PROMPTS)
    )
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
