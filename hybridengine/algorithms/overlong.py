"""DAPO's soft punishment of responses that come close to the limit (arXiv:2503.14476, eq. 13)."""

from __future__ import annotations


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, then down linearly to -1 at the limit.

    Limit 100, buffer 20: 80 -> 0, 81 -> -.05, 90 -> -.5, 100 -> -1.

    Raises:
        ValueError: a buffer that is not within the limit.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"algorithm.overlong_buffer={buffer}: must be 1 to rollout.max_tokens={limit} tokens")
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
