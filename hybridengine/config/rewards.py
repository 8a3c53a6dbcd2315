"""The ``reward`` and ``monitor`` sections: what a response is worth, and the alarms that watch it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybridengine.config.keys import key


@dataclass(kw_only=True)
class RewardTerm:
    fn: str = key(
        "???",
        "exact_match | regex | format | math | math_verify | code | reasoning_gym | served | path.py:function | "
        "module:function",
    )
    weight: float = key(1.0, "weight in the total")
    kwargs: dict[str, Any] = key({}, "keyword arguments of the function", finite=False)
    isolate: bool | None = key(None, "run it in worker processes; default: reward.isolate")
    batch: bool | None = key(None, "it takes lists; default: told by its parameters' names")
    on_error: str | None = key(None, "default: reward.on_error", choices=["auto", "raise", "zero"])
    timeout_seconds: float | None = key(None, "time limit of one call, seconds; default: reward.timeout_seconds", gt=0)


@dataclass(kw_only=True)
class AuditTerm:
    fn: str = key("???", "as reward.fn")
    kwargs: dict[str, Any] = key({}, "keyword arguments of the function", finite=False)
    share: float = key(0.1, "share of the samples that it scores", gt=0, le=1)
    isolate: bool | None = key(None, "run it in worker processes; default: reward.isolate")


@dataclass(kw_only=True)
class RewardModelConfig:
    """A frozen sequence classifier with one label, beside the policy on the training ranks."""

    path: str | None = key(None, "Hugging Face directory with score.weight; null = no reward model")
    template: str | None = key(
        None, "what it reads: a text with {prompt} and {response}; default: its tokenizer's chat template"
    )
    weight: float = key(1.0, "weight of its score in the total")


@dataclass(kw_only=True)
class RewardConfig:
    fn: str | None = key(None, "one reward function: a built-in name, path.py:function or module:function")
    kwargs: dict[str, Any] = key({}, "keyword arguments of reward.fn", finite=False)
    #: values are RewardTerm once composed; open here so that ``reward.terms.a.fn=math`` works on the command line
    terms: dict[str, Any] = key(
        {},
        "several: reward.terms.<name>.{fn, weight, kwargs, isolate, batch, on_error, timeout_seconds}; "
        "summed with their weights",
    )
    #: values are AuditTerm once composed
    audit: dict[str, Any] = key(
        {}, "second opinions, never trained on: reward.audit.<name>.{fn, kwargs, share, isolate}; see docs/rewards.md"
    )
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    isolate: bool = key(
        False, "run functions of your own in worker processes: they can be stopped, and don't slow generation down"
    )
    on_error: str = key(
        "auto",
        "what a failing function costs",
        choices={
            "auto": "raise, but zero where an isolated one takes too long or its process dies",
            "raise": "the run",
            "zero": "the sample's score",
        },
    )
    timeout_seconds: float = key(10.0, "time limit of one scoring call", gt=0)
    timeout_budget_seconds: float = key(
        60.0, "what isolated calls that reach their limit may use up per rollout and rank; then each gets 0.5 s", ge=0
    )
    workers: int = key(
        4, "calls at the same time on each rank: threads, with a process each for isolated functions", gt=0
    )
    memory_gib: float = key(4.0, "private memory of one worker process", gt=0)
    skip_special_tokens: bool = key(
        True, "leave special tokens such as a <think> out of the text that is scored (never seen: the end token)"
    )


@dataclass(kw_only=True)
class MonitorConfig:
    rules: dict[str, Any] = key(
        {},
        "alarms: monitor.rules.<name>='completions/clipped_ratio > 0.5 for 3'; null switches a default one off; see "
        "docs/rewards.md",
    )
    defaults: bool = key(True, "also watch for what usually goes wrong")
    action: str = key("warn", "at an alarm", choices={"warn": "", "stop": "save, and exit with status 4"})
