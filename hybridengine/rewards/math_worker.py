"""The child process of :mod:`hybridengine.rewards.math`: reads requests, writes scores, one JSON line each."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any


def main() -> None:
    # What the libraries print must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    score("1", "1")  # builds the parsers
    replies.write('"ready"\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any] = {"score": score(request["response"], request["answer"])}
        except ValueError as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")


def score(response: str, answer: str) -> float:
    """1.0 if math-verify finds the response's answer equivalent to ``answer``.

    Raises:
        ValueError: the ground truth can't be parsed.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    latex_first = LatexExtractionConfig(boxed_match_priority=0)
    expressions = [latex_first, ExprExtractionConfig()]
    gold = parse(answer, expressions, parsing_timeout=None)
    if not gold or all(isinstance(item, str) for item in gold):
        gold = parse(f"${answer}$", expressions, parsing_timeout=None)
    if not gold:
        raise ValueError(f"math: the ground truth {answer!r} can't be parsed as mathematics")
    found = parse(response, expressions, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


if __name__ == "__main__":
    main()
