"""Which sequences are probed: the lengths at which implementations of one model are known to part."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from hybridengine.models.facts import rope_parameters, sliding_windows
from hybridengine.types import Prompt

#: Response tokens per probe. A probe at a boundary has half of them before and half of them behind it.
RESPONSE_TOKENS = 8
#: Prompts of probes count down from here: no prompt of the data has a negative index, and none of these is scored.
FIRST_INDEX = -1


def probe_lengths(hf_config: Any, max_model_len: int) -> dict[str, int]:
    """Name of each probe and tokens of its prompt, different ones only, none longer than the context allows.

    A context of 96 tokens and a sliding window of 32: shortest 1, longest 88, window-32 28 (its response crosses the
    window), beyond-window-32 68 (everything in the response looks back further than the window).
    """
    longest = max(1, max_model_len - RESPONSE_TOKENS)
    wanted = {"shortest": 1, "longest": longest}
    half = RESPONSE_TOKENS // 2
    for window in sliding_windows(hf_config):
        wanted[f"window-{window}"] = window - half
        wanted[f"beyond-window-{window}"] = 2 * window + half
    for rope in rope_parameters(hf_config):
        original = rope.get("original_max_position_embeddings")
        if original and rope.get("rope_type", "default") != "default":
            wanted[f"rope-{original}"] = int(original) - half
            wanted[f"beyond-rope-{original}"] = int(original) + half
    found: dict[str, int] = {}
    for name, length in wanted.items():
        if 1 <= length <= longest and length not in found.values():
            found[name] = length
    return found


def choose_probes(
    hf_config: Any, max_model_len: int, *, vocabulary: int, texts: Sequence[Sequence[int]] = (), copies: int = 1
) -> list[Prompt]:
    """Prompts of the probes, each named by its ``text``.

    Args:
        vocabulary: tokens that may stand in a prompt: ids below this.
        texts: token ids of real prompts, which the probes are filled with; without any they are random.
        copies: times that each probe is asked for, one after the other: the number of rollout replicas.
    """
    source = _tokens(texts, vocabulary)
    lengths = probe_lengths(hf_config, max_model_len)
    drawn = {name: [next(source) for _ in range(length)] for name, length in lengths.items()}
    return [
        Prompt(index=FIRST_INDEX - k, token_ids=list(tokens), text=name)
        for k, (name, tokens) in enumerate((n, t) for n, t in drawn.items() for _ in range(copies))
    ]


def _tokens(texts: Sequence[Sequence[int]], vocabulary: int) -> Iterator[int]:
    """Tokens of the texts, over and over; random ones without texts."""
    real = [token for text in texts for token in text if token < vocabulary]
    generator = random.Random(0)
    while True:
        if real:
            yield from real
        else:
            yield generator.randrange(vocabulary)
