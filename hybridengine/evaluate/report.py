"""Results of an evaluation, as numbers and as tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridengine.config import RewardConfig
from hybridengine.config.schema import ConfigError
from hybridengine.data.rows import ABSENT, Row
from hybridengine.evaluate.passk import majority_at_k, pass_at_k
from hybridengine.report.samples import is_right
from hybridengine.report.summary import wilson_interval
from hybridengine.types import Prompt, Trajectory

if TYPE_CHECKING:
    from rich.table import Table

Decode = Callable[[list[int]], str]


def summarize_evaluation(
    found: Sequence[Trajectory], reward: RewardConfig, decode: Decode, *, ks: Sequence[int], by: str | None = None
) -> dict[str, Any]:
    """The numbers of all responses, and of those with each value of the column ``by``.

    ``accuracy`` is the mean over samples, as in the run's validations. Its 95 % interval counts prompts: samples of one
    prompt are not independent. Where each prompt has one sample, that is Wilson's interval of the proportion.

    Args:
        found: scored samples, as many of each prompt.
        decode: tokens to the text that was scored.
        ks: for pass@k and majority@k.
        by: a column of the data, nested by dots.
    """
    groups = _by_prompt(found)
    votes = {id(sample): vote_of(decode(sample.token_ids), reward) for sample in found}
    summary = _numbers(groups, votes, ks)
    if by is not None:
        values: dict[str, list[list[Trajectory]]] = {}
        for group in groups:
            values.setdefault(str(column(group[0].prompt, by)), []).append(group)
        summary["by"] = {"column": by, "values": {v: _numbers(values[v], votes, ks) for v in sorted(values)}}
    return summary


def _numbers(
    groups: Sequence[Sequence[Trajectory]], votes: Mapping[int, Hashable], ks: Sequence[int]
) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group]
    correct = [[is_right(sample) for sample in group] for group in groups]
    shares = [sum(c) / len(c) for c in correct]
    accuracy = sum(map(sum, correct)) / len(samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    numbers: dict[str, Any] = {
        "accuracy": accuracy,
        "accuracy_interval": list(wilson_interval(min(len(groups), sum(shares)), len(groups))),
        "prompts": len(groups),
        "samples": len(samples),
        "reward": sum(rewards) / len(rewards),
        "mean_length": sum(len(sample.token_ids) for sample in samples) / len(samples),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
    }
    for k in ks:
        numbers[f"pass@{k}"] = sum(pass_at_k(len(c), sum(c), k) for c in correct) / len(correct)
    if max(map(len, groups)) > 1:
        answers = [[votes[id(sample)] for sample in group] for group in groups]
        for k in ks:
            each = [majority_at_k(a, c, k) for a, c in zip(answers, correct, strict=True)]
            numbers[f"majority@{k}"] = sum(each) / len(each)
    return numbers


def vote_of(text: str, reward: RewardConfig) -> str | None:
    """What a response answers, for majority voting: equal answers vote together; None where it has none.

    What the pattern of a ``regex`` reward finds, the contents of the last \\\\boxed{}, the text after the last "####"
    or "answer:", else the whole response.
    """
    from hybridengine.data.prepare import last_boxed
    from hybridengine.rewards.builtin import extract

    if reward.fn == "regex":
        return extract(text, reward.kwargs["pattern"], select=reward.kwargs.get("select", "last"))
    if "\\boxed" in text or "\\fbox" in text:
        boxed = last_boxed(text)
        return None if boxed is None else "".join(boxed.split())
    for mark in ("####", "answer:"):
        _, found, rest = text.lower().rpartition(mark)
        if found:
            return rest.strip().rstrip(".").strip() or None
    return text.strip() or None


def column(prompt: Prompt, name: str) -> Any:
    """A prompt's value in a column of the data.

    Raises:
        ConfigError: it has no such column.
    """
    value = Row(prompt.metadata, "").get(name)
    if value is ABSENT:
        raise ConfigError(f"--by {name}: no such column; there are {', '.join(sorted(prompt.metadata)) or 'no others'}")
    return value


def _by_prompt(found: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = {}
    for sample in found:
        groups.setdefault(sample.prompt.index, []).append(sample)
    return list(groups.values())


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """The summary as a person wants to read it."""
    from rich.table import Table

    table = Table(title=str(summary["name"]), title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    low, high = summary["accuracy_interval"]
    of = f"{summary['prompts']} prompts" + (
        f" × {summary['samples'] // summary['prompts']} samples" if summary["samples"] > summary["prompts"] else ""
    )
    table.add_row("accuracy", f"[bold green]{summary['accuracy']:.4f}[/]  (95 %: {low:.3f}–{high:.3f}, {of})")
    for name, value in summary.items():
        if name.startswith(("pass@", "majority@")):
            table.add_row(name, f"{value:.4f}")
    table.add_row("reward", f"{summary['reward']:.4f}")
    table.add_row("length", f"{summary['mean_length']:.1f} tokens, {100 * summary['truncated']:.1f} % cut at the limit")
    if "by" not in summary:
        return [table]
    parts = Table(title=f"by {summary['by']['column']}", title_justify="left")
    for head in ("value", "accuracy", "95 %", "prompts"):
        parts.add_column(head)
    for value, numbers in summary["by"]["values"].items():
        low, high = numbers["accuracy_interval"]
        parts.add_row(value, f"{numbers['accuracy']:.4f}", f"{low:.3f}–{high:.3f}", str(numbers["prompts"]))
    return [table, parts]
