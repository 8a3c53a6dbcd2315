"""A model whose answers are long-tailed, for real: a Qwen2 that ends its answer with a probability the prompt decides.

The embedded model answers in three tokens; no schedule has anything to do there. What matters here is the distribution
of lengths, so the model is built for it rather than trained: a transformer with all its layers, random and small, whose
embedding and output matrices make a Markov chain of it. Its words come in classes ``a`` .. ``h``; after a word follows
a word of the same class, each of the eight equally likely, or, with the class's own probability, the end. So the last
word of the prompt decides how long the answer is expected to be (4 to 200 tokens, geometric), most prompts have short
answers and few have very long ones, and the engine, the trainer and the weight sync know nothing of it.

The other words of a prompt are random: no two prompts are alike, and nothing can be learnt about a prompt's length from
earlier steps, as with the data of a first epoch. Reward: the share of words numbered 0 to 3, half at the start. It
can be learnt, and lengths play no part in it: an answer without words gets that half as well. (With 0 instead, the
model learns within ten steps not to end its answers at all.)

    model.path=DIR/model model.tokenizer=DIR/tokenizer data.train=DIR/train.jsonl
    reward.fn=benchmarks/placement_workload.py:low_words
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PAD, EOS = "<pad>", "<eos>"
CLASSES = "abcdefgh"
WORDS = 8
#: Expected length of an answer, and how many of the prompts have it, by class.
EXPECTED = (4, 7, 12, 20, 34, 60, 110, 200)
SHARE = (20, 20, 17, 15, 11, 8, 5, 4)
ALPHABET = [PAD, EOS, *(f"{letter}{word}" for letter in CLASSES for word in range(WORDS))]
PROMPT_WORDS = 8
#: Logit of the words of the same class over all others, whose logit is 0: one word in 3,000 leaves its class.
PULL = 10.0


def low_words(prompt: str, response: str, answer: Any) -> float:
    """Share of the answer's words that are numbered 0 to 3; one half for an empty answer."""
    words = response.split()
    return sum(word[1:] in ("0", "1", "2", "3") for word in words) / len(words) if words else 0.5


def make_model(directory: Path, *, hidden: int = 128, layers: int = 2, seed: int = 0) -> None:
    """Write ``model`` and ``tokenizer`` into the directory: beside a Qwen2 model, transformers would take the tokenizer
    for Qwen2's own and split words its way."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    end, pad = ALPHABET.index(EOS), ALPHABET.index(PAD)
    config = Qwen2Config(
        vocab_size=len(ALPHABET), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 64), max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=end, pad_token_id=pad, dtype=torch.float32,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    # After the last norm a word's hidden state is about √hidden in the direction of its class.
    scale = math.sqrt(hidden)
    embedding.mul_(0.05)
    head.mul_(0.05)
    head[pad] = 0
    for number, expected in enumerate(EXPECTED):
        rows = slice(2 + number * WORDS, 2 + (number + 1) * WORDS)
        embedding[rows, number] = 1.0
        head[rows, number] = PULL / scale
        odds = 1 / expected / (1 - 1 / expected)
        head[end, number] = (PULL + math.log(WORDS * odds)) / scale
    for layer in model.model.layers:  # what they add stays small beside the embedding
        layer.self_attn.o_proj.weight.data.mul_(0.1)
        layer.mlp.down_proj.weight.data.mul_(0.1)
    model.save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "tokenizer")


def make_tokenizer() -> Any:
    """One token per word, separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(ALPHABET)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, padding_side="left", clean_up_tokenization_spaces=False
    )


def write_prompts(path: Path, *, size: int, seed: int = 0) -> Path:
    """Prompts as JSON lines. Each block of as many prompts as SHARE adds up to has every class its share of times."""
    generator = random.Random(seed)
    lines: list[str] = []
    while len(lines) < size:
        block = [letter for letter, share in zip(CLASSES, SHARE, strict=True) for _ in range(share)]
        generator.shuffle(block)
        for letter in block:
            words = [generator.choice(ALPHABET[2:]) for _ in range(PROMPT_WORDS - 1)]
            words.append(f"{letter}{generator.randrange(WORDS)}")
            lines.append(json.dumps({"prompt": " ".join(words), "answer": letter}))
    path.write_text("\n".join(lines[:size]) + "\n")
    return path
