"""Metrics of a batch of responses that nothing else computes: entropy, repetition, disagreement of audits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hybridengine.types import Trajectory

#: Tokens of the n-grams, and of the shortest response that is looked at.
NGRAM, SHORTEST = 4, 8


def health(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``completions/surprisal``: minus the mean log-probability of sampled tokens, nats: an unbiased estimate of the
    sampling distribution's entropy per token. ``completions/distinct_4grams``: how many of a response's 4-grams of
    tokens are different, as a mean over responses of at least 8 tokens. ``completions/length_correlation``: of reward
    and length within prompts. ``audit/<name>/disagreement``: share of the audited samples on which the audit is on the
    other side of 0.5 than the first reward, or further than 0.5 from it.
    """
    found: dict[str, float] = {}
    logprobs = [x for t in trajectories for x in t.logprobs if math.isfinite(x)]
    if logprobs:
        found["completions/surprisal"] = -sum(logprobs) / len(logprobs)
    long = [t.token_ids for t in trajectories if len(t.token_ids) >= SHORTEST]
    if long:
        found["completions/distinct_4grams"] = sum(map(distinct_ngrams, long)) / len(long)
    if (correlation := length_correlation(trajectories)) is not None:
        found["completions/length_correlation"] = correlation
    for name in sorted({key for t in trajectories for key in t.rewards if key.startswith("audit/")}):
        pairs = [(next(iter(t.rewards.values())), t.rewards[name]) for t in trajectories if name in t.rewards]
        disagree = sum((a > 0.5) != (b > 0.5) or abs(a - b) > 0.5 for a, b in pairs)
        found[f"{name}/disagreement"] = disagree / len(pairs)
        found[f"{name}/samples"] = float(len(pairs))
    return found


def length_correlation(trajectories: Sequence[Trajectory]) -> float | None:
    """Pearson's correlation of reward and response length (tokens) within prompts: both less their prompt's mean, over
    all samples. None where either is the same throughout.
    """
    groups: dict[int, list[tuple[float, float]]] = {}
    for t in trajectories:
        groups.setdefault(t.prompt.index, []).append((t.reward or 0.0, float(len(t.token_ids))))
    if not groups:
        return None
    pairs = np.concatenate([np.array(group) - np.mean(group, axis=0) for group in groups.values()])
    scale = np.sqrt((pairs**2).sum(axis=0)).prod()
    return float((pairs[:, 0] * pairs[:, 1]).sum() / scale) if scale > 1e-9 else None


def distinct_ngrams(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """Different n-grams over all n-grams (Li et al., arXiv:1510.03055, per response).

    >>> distinct_ngrams([1, 2, 1, 2, 1, 2], n=2)   # 12 21 12 21 12
    0.4
    """
    tokens = np.asarray(token_ids)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, n)
    return len(np.unique(windows, axis=0)) / len(windows)
