"""The rules that are active by default."""

from __future__ import annotations

from collections.abc import Iterable

from hybridengine.config import MonitorConfig, ParityConfig
from hybridengine.monitors.rules import Diverging, Rule

#: Name -> (rule, the usual cause).
DEFAULTS: dict[str, tuple[str, str]] = {
    "clipped": (
        "completions/clipped_ratio > 0.5 for 3",
        "Most responses are cut at rollout.max_tokens: raise it, or see whether responses only grow",
    ),
    "length": (
        "completions/mean_length > 2 * start for 3",
        "Responses grow: see in the samples whether they reason more, or fill up what the reward counts",
    ),
    "length_rewarded": (
        "completions/length_correlation > 0.8 for 3",
        "Of a prompt's responses the longer one nearly always scores higher: the reward pays for length",
    ),
    "entropy": (
        "completions/surprisal < 0.05 * start for 5",
        "The policy has nearly stopped exploring: lower train.lr, or set algorithm.entropy_coef or algorithm.kl_coef",
    ),
    "repetition": (
        "completions/distinct_4grams < 0.5 * start for 3",
        "Responses repeat themselves",
    ),
    "flat_groups": (
        "frac_reward_zero_std > 0.98 for 5",
        "Hardly any group has both good and bad samples, so there is little to learn from: other prompts, more samples "
        "per prompt, or a reward with more steps",
    ),
    "effective_samples": (
        "sampling/effective_sample_size < 0.5 for 3",
        "A few tokens carry the update: samples are too old or the engines disagree; see schedule.staleness",
    ),
}
#: Share of audited samples on which the second verifier may differ.
AUDIT_RULE = "audit/{}/disagreement > 0.2 for 3"
AUDIT_ADVICE = "The reward and its audit judge the same responses differently: look at those with a high reward"


#: Rules that ``parity.step_warn`` and ``parity.step_stop`` make, of the mean over a step's tokens.
MISMATCH, MISMATCH_STOP = "mismatch", "mismatch_stop"
MISMATCH_ADVICE = (
    "Rollout engine and trainer disagree about the same tokens: `hybridengine doctor parity` says where; see "
    "docs/engines.md"
)


def mismatch_rules(parity: ParityConfig) -> dict[str, tuple[str, str]]:
    """Warn at the first bound, stop at the second."""
    bounds = {MISMATCH: parity.step_warn, MISMATCH_STOP: parity.step_stop}
    return {
        name: (f"sampling/logp_difference/mean > {bound!r} for 2", MISMATCH_ADVICE)
        for name, bound in bounds.items()
        if bound is not None
    }


def rules_of(
    config: MonitorConfig, audits: Iterable[str] = (), parity: ParityConfig | None = None
) -> list[Rule | Diverging]:
    """The configured rules over the default ones. A rule of a default's name replaces it, null removes it.

    Raises:
        ValueError: a rule that can't be read.
    """
    texts: dict[str, tuple[str, str]] = dict(DEFAULTS) if config.defaults else {}
    if config.defaults:
        texts |= {f"audit_{name}": (AUDIT_RULE.format(name), AUDIT_ADVICE) for name in audits}
    texts |= {} if parity is None else mismatch_rules(parity)
    removed = {name for name, text in config.rules.items() if text is None}
    texts |= {name: (str(text), "") for name, text in config.rules.items() if text is not None}
    rules: list[Rule | Diverging] = [
        Rule.parse(name, text, advice=advice) for name, (text, advice) in texts.items() if name not in removed
    ]
    for rule in rules:
        if isinstance(rule, Rule) and rule.name == MISMATCH_STOP:
            rule.stops = True
    if config.defaults and "held_out" not in config.rules:
        rules.append(Diverging())
    return rules
