"""A tokenizer of words, and trajectories made of them."""

from __future__ import annotations

from typing import Any

from hybridengine.config import RewardConfig
from hybridengine.rewards.scorer import Scorer
from hybridengine.types import Prompt, Trajectory


class Words:
    """Token i is the i-th word; 0 is the end token, and what is in ``special`` are special tokens, too."""

    def __init__(self, *words: str, special: tuple[str, ...] = ()) -> None:
        self._words = ("<end>", *words)
        self.all_special_ids = [0, *(i for i, word in enumerate(self._words) if word in special)]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.all_special_ids)]
        return " ".join(self._words[i] for i in kept)


def trajectory(
    token_ids: list[int] | None = None,
    *,
    index: int = 7,
    sample: int = 2,
    answer: Any = "5",
    truncated: bool = False,
    messages: list[dict[str, Any]] | None = None,
    **metadata: Any,
) -> Trajectory:
    ids = [1, 0] if token_ids is None else token_ids
    return Trajectory(
        prompt=Prompt(index=index, token_ids=[3], text="2+3=", answer=answer, metadata=metadata, messages=messages),
        sample_index=sample,
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        versions=[0] * len(ids),
        truncated=truncated,
    )


def scorer(*words: str, group_size: int = 0, **config: Any) -> Scorer:
    return Scorer(RewardConfig(**config), Words(*words), group_size=group_size)
