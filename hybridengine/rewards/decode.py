"""From response tokens to the text that reward functions see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Decoded:
    """``plain``: as configured. ``special``: with special tokens, such as ``<think>`` where it is one; no end token."""

    plain: str
    special: str


class Decoder:
    """Decodes responses. For one thread.

    Args:
        tokenizer: its own copy.
        skip_special_tokens: leave them out of ``plain``.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._special = set(getattr(tokenizer, "all_special_ids", None) or ())

    def decode(self, token_ids: list[int]) -> Decoded:
        """Both texts of one response; special tokens that it ends with are in neither."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._special:
            end -= 1
        body = token_ids[:end]
        plain = self._tokenizer.decode(body if self._special else token_ids, skip_special_tokens=True)
        if self._special.isdisjoint(body):
            return Decoded(plain, plain)
        special = self._tokenizer.decode(body, skip_special_tokens=False)
        return Decoded(plain if self._skip else special, special)
