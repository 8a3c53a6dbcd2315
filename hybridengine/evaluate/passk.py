"""Numbers of an evaluation: pass@k, majority@k and their intervals."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence

#: Subsets of k of n samples that majority@k is averaged over exactly; above, it draws so many.
MOST_SUBSETS = 5000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that of k of the n samples, drawn without replacement, at least one is right, when c of n are.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    >>> round(pass_at_k(10, 3, 1), 5), round(pass_at_k(10, 3, 5), 5)
    (0.3, 0.91667)

    Raises:
        ValueError: k is not in [1, n], or c not in [0, n].
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be 1 to the number of samples, {n}")
    if not 0 <= c <= n:
        raise ValueError(f"c={c}: must be 0 to the number of samples, {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Mean over subsets of k samples of whether their most frequent answer is right (self-consistency).

    Of answers that are equally frequent each counts with its share, as if one were drawn.

    >>> majority_at_k(["7", "7", "8"], [True, True, False], 3)
    1.0
    >>> majority_at_k(["7", "8"], [True, False], 2)
    0.5

    Args:
        answers: by sample; equal answers vote together. None is no answer and has no vote.
        correct: by sample.

    Raises:
        ValueError: k is not in [1, number of samples].
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be 1 to the number of samples, {n}")
    if math.comb(n, k) <= MOST_SUBSETS:
        subsets = list(itertools.combinations(range(n), k))
    else:
        drawn = random.Random(f"{n}/{k}")
        subsets = [tuple(drawn.sample(range(n), k)) for _ in range(MOST_SUBSETS)]
    return sum(_vote([answers[i] for i in subset], [correct[i] for i in subset]) for subset in subsets) / len(subsets)


def _vote(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = {answer: any(c for a, c in zip(answers, correct, strict=True) if a == answer) for answer in winners}
    return sum(right.values()) / len(winners)
