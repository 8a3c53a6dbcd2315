"""Corrections for sampling from another policy than the one that is scored: weights, and rejection.

The rollout engine's probabilities differ from the trainer's by kernels and precision even at equal weights, and by
whole updates where the schedule trains on older samples. With Δ_t = log π_trainer - log π_rollout per token:

    level        log of the weight, or what rejection looks at
    token        Δ_t
    sequence     Σ_t Δ_t: unbiased for the response's reward, at a variance that grows with its length
    geometric    mean_t Δ_t

A weight multiplies the surrogate. ``outside`` says what becomes of one beyond its bounds: truncate (Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025) or zero (a token that stays in the count;
IcePop, Ling Team, arXiv:2510.18855). What is rejected leaves numerator, count and baseline, so rejection needs the
trainer's log-probabilities before the advantages: one forward pass more where a rollout has a single optimizer step.

Everything is computed on logarithms, which are cut at ±20 before ``exp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridengine.algorithms.losses import MAX_LOG_RATIO, masked, masked_sum, sequence_mean, sequence_sum
from hybridengine.config import Config, CorrectionConfig

OFF_POLICY_SCHEDULES = ("partial", "one_step_off", "async")
LEVELS = ("none", "token", "sequence", "geometric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """``algorithm.correction`` with its preset filled in.

    Attributes:
        weight, reject: one of LEVELS.
        bounds: of the weight.
        outside: truncate | zero.
        reject_bounds: of what rejection looks at: with k1 the ratio exp(Δ), with k3 the divergence exp(Δ) - 1 - Δ, an
            estimate of KL(rollout || trainer) whose sequence and geometric levels are its sum and its mean.
        reject_metric: k1 | k3.
    """

    weight: str = "none"
    bounds: tuple[float, float] = (0.0, 2.0)
    outside: str = "truncate"
    reject: str = "none"
    reject_bounds: tuple[float, float] = (0.5, 2.0)
    reject_metric: str = "k1"


NONE = Correction()
PRESETS: dict[str, Correction] = {
    "none": NONE,
    "tis": Correction(weight="token"),
    "tis_sequence": Correction(weight="sequence"),
    "mis": Correction(weight="token", outside="zero"),
    "icepop": Correction(weight="token", bounds=(0.5, 5.0), outside="zero"),
    "seq_mask_tis": Correction(
        weight="token", bounds=(0.0, math.inf), reject="geometric", reject_bounds=(0.999, 1.002)
    ),
}


def preset_of(config: Config) -> str:
    """``algorithm.correction.preset``, with auto decided: token-level truncation where the schedule is off-policy.

    None where ``old_logprobs=rollout``: the ratio itself is against the sampling policy then.
    """
    chosen = config.algorithm.correction.preset
    if chosen != "auto":
        return chosen
    off_policy = config.schedule.name in OFF_POLICY_SCHEDULES
    return "tis" if off_policy and config.algorithm.old_logprobs != "rollout" else "none"


def correction_of(config: CorrectionConfig) -> Correction:
    """The preset (an undecided auto is none), with what else is set put over it.

    Raises:
        ValueError: see :func:`correction_problems`, which names all of them.
    """
    for problem in correction_problems(config):
        raise ValueError(problem)
    given = {item.name: getattr(config, item.name) for item in fields(Correction)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    return replace(PRESETS["none" if config.preset == "auto" else config.preset], **given)


def correction_problems(config: CorrectionConfig) -> list[str]:
    """What is wrong with these keys by themselves; each names its key, its value and what would be right."""
    where, found = "algorithm.correction.", []
    for name in ("bounds", "reject_bounds"):
        value = getattr(config, name)
        if value is not None and not (len(value) == 2 and 0 <= value[0] < value[1]):
            found.append(f"{where}{name}={value}: must be [low, high] with 0 <= low < high, such as [0, 2]")
    if config.reject not in (None, "none") and not config.reject_bounds and PRESETS.get(config.preset, NONE) == NONE:
        found.append(f"{where}reject={config.reject}: needs {where}reject_bounds=[low, high]")
    if config.reject_metric == "k3" and (config.reject_bounds or [1.0])[0] != 0:
        found.append(f"{where}reject_metric=k3: a divergence is 0 or more; needs {where}reject_bounds=[0, high]")
    return found


# -- weights ---------------------------------------------------------------------------------------------------------


def log_weights(difference: Tensor, mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """Each token's log-weight; ``difference`` Δ [R], masked-out entries anything -> [R].

    Δ = [.2, .2] in one sequence: sequence .4, geometric .2.
    """
    if level == "sequence":
        return sequence_sum(difference, mask, sequence_ids)
    if level == "geometric":
        return sequence_mean(difference, mask, sequence_ids)
    return masked(difference, mask)


def importance_weights(correction: Correction, logs: Tensor) -> Tensor:
    """Weights [R] from log-weights, without gradient. Ratios [.1, .5, 1, 3, 6]:

    tis (cap 2)   [.1, .5, 1, 2, 2]
    mis (cap 2)   [.1, .5, 1, 0, 0]
    icepop        [ 0, .5, 1, 3, 0]
    """
    low, high = correction.bounds
    weights = logs.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction.outside == "zero":
        return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))
    return weights.clamp(low, high)


def weight_sums(
    correction: Correction, logs: Tensor, weights: Tensor, difference: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Sums over the trained tokens, which :func:`finish_metrics` makes means of.

    Args:
        logs: log-weights [R] before the bounds; weights: [R], after them.
        difference: Δ [R].
    """
    low, high = correction.bounds
    raw = logs.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    cut = masked(difference.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "sampling/importance_weight": masked_sum(weights, mask),
        "sampling/importance_weight_squared": masked_sum(weights.square(), mask),
        "sampling/weight_above": (mask & (raw > high)).sum(),
        "sampling/weight_below": (mask & (raw < low)).sum(),
        "sampling/kl": masked_sum(-difference.detach(), mask),
        "sampling/chi2": masked_sum((2 * cut).exp(), mask),
        "sampling/mean_exp_abs": masked_sum(cut.abs().exp(), mask),
    }


def finish_metrics(summed: dict[str, float], tokens: float) -> dict[str, float]:
    """Takes out of ``summed`` what a division by the tokens does not finish, and returns it finished.

    sampling/chi2: mean of (π_trainer/π_rollout)² - 1 per token, an estimate of χ²(trainer || rollout).
    sampling/effective_sample_size: Kish's, (Σw)² / (n Σw²), as a fraction of the tokens.
    """
    found = {}
    squared = summed.pop("sampling/importance_weight_squared", None)
    if squared:
        found["sampling/effective_sample_size"] = summed["sampling/importance_weight"] ** 2 / (tokens * squared)
    if (squares := summed.pop("sampling/chi2", None)) is not None:
        found["sampling/chi2"] = squares / tokens - 1
    return found


# -- rejection -------------------------------------------------------------------------------------------------------


def accepted_tokens(
    correction: Correction, logprobs: Sequence[float], rollout_logprobs: Sequence[float]
) -> NDArray[np.bool_]:
    """bool, one per token of a response: what rejection leaves of it. NaN is never left."""
    difference = np.asarray(logprobs, dtype=np.float64) - np.asarray(rollout_logprobs, dtype=np.float64)
    if correction.reject == "none":
        return np.ones(len(difference), dtype=bool)
    low, high = correction.reject_bounds
    values = difference
    if correction.reject_metric == "k3":
        values = np.expm1(np.minimum(difference, MAX_LOG_RATIO)) - difference
    else:
        low, high = math.log(low) if low else -math.inf, math.log(high)
    if correction.reject != "token":
        total = values.sum() if correction.reject == "sequence" else values.mean()
        values = np.full(len(values), total)
    return (values >= low) & (values <= high)
