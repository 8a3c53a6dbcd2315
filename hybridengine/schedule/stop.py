"""Stop strings (``rollout.stop``): a response ends with the token that completes one of them.

vLLM stops there by itself. Every other engine goes on to an end token or the token limit, and what it generated after
the stop string is removed here, before the response is scored: the same tokens are left, as each of them was drawn
from what stands before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from hybridengine.config import RewardConfig
from hybridengine.rewards.scorer import Scorer
from hybridengine.types import Trajectory


class StopStrings:
    """Finds stop strings in tokens.

    Args:
        tokenizer: decodes them, special tokens included.
        stop: the texts, none of them empty.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to and with the one that completes the first stop string; None without one."""
        if not self._stop or not self._has_stop(token_ids, len(token_ids)):
            return None
        # Once a prefix has a stop string, every longer one has it.
        return bisect.bisect_left(range(len(token_ids)), True, key=lambda n: self._has_stop(token_ids, n))

    def cut(self, trajectory: Trajectory) -> None:
        """End the response at its first stop string, in place."""
        length = self.length(trajectory.token_ids)
        if length is not None:
            for values in (trajectory.token_ids, trajectory.logprobs, trajectory.versions):
                del values[length:]
            trajectory.truncated = False

    def _has_stop(self, token_ids: Sequence[int], length: int) -> bool:
        text = self._tokenizer.decode(token_ids[:length], skip_special_tokens=False)
        return any(stop in text for stop in self._stop)


class StoppingScorer(Scorer):
    """A Scorer whose responses end at stop strings; ``options``: further arguments of Scorer."""

    def __init__(self, config: RewardConfig, tokenizer: Any, stop: Sequence[str], **options: Any) -> None:
        super().__init__(config, tokenizer, **options)
        self._stop_strings = StopStrings(tokenizer, stop)

    def submit(self, trajectory: Trajectory) -> None:
        self._stop_strings.cut(trajectory)
        super().submit(trajectory)
