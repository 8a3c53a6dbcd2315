"""The verdict of the math-verify package, for comparison with others and as an audit. Runs in a worker process."""

from __future__ import annotations

import logging
from typing import Any


def math_verify_reward(prompt: str, response: str, answer: Any) -> float:
    """1 if math-verify finds the response's answer equivalent to ``answer``, else 0.

    A bare LaTeX answer is given to it as a formula. Its own time limits, which need a main thread, are off: the worker
        has
    one.

    Raises:
        ValueError: no ground truth, or one that it can't parse.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError:
        raise ValueError("reward math_verify needs the package math-verify (pip install math-verify)") from None

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if answer is None:
        raise ValueError("math_verify needs the row's answer, which is None; see data.answer_key")
    expressions = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    text = str(answer)
    gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", expressions, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math_verify: the ground truth {answer!r} can't be parsed")
    found = parse(response, expressions, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))
