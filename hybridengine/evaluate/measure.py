"""Measure a model: accuracy, pass@k and majority@k on the validation prompts of a configuration.

    python -m hybridengine.evaluate outputs/run                 its newest checkpoint, as it validated itself
    python -m hybridengine.evaluate outputs/run --best rollout.validation.n=16 rollout.validation.temperature=1
    python -m hybridengine.evaluate MODEL_DIRECTORY data.validation=test.jsonl reward=math rollout.max_tokens=512
    torchrun --nproc-per-node 8 -m hybridengine.evaluate ...                 several replicas

What follows are keys as for training. The same engine, prompts, seeds and reward as in the run's own validation give
the same numbers. With rollout.validation.n above 1, accuracy is the mean over samples.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridengine.config import Config
from hybridengine.config.compose import build
from hybridengine.config.file import overrides_of
from hybridengine.config.overrides import quoted
from hybridengine.config.schema import ConfigError
from hybridengine.export import source_model
from hybridengine.failure import report
from hybridengine.report.runs import choose_checkpoint
from hybridengine.validate.resolve import resolve

if TYPE_CHECKING:
    from hybridengine.distributed.world import World
    from hybridengine.types import Trajectory

#: Sections whose contradictions an evaluation need not mind.
TRAINING_ONLY = (
    "train.",
    "algorithm.",
    "checkpoint.",
    "memory.",
    "schedule.",
    "data.prompts_per_step",
)

#: An evaluation has no trainer to share ranks with, or to send samples to.
ALONE = ("++placement.name=colocated", "++schedule.name=sync", "++sync.method=auto", "++checkpoint.resume=never")

#: Without a run all prompts of data.validation count.
ALL_PROMPTS = 10**9


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a configuration, and where the weights are."""

    config: Config
    model_path: Path
    checkpoint: Path | None  # None: the weights of model_path
    step: int | None
    name: str


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    given = _parser().parse_intermixed_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    try:
        subject = read_subject(given)
        ks = read_ks(given.k, subject.config.rollout.validation.n)
        found = evaluate(subject, by=given.by)
        if found is not None:
            _write(found, subject, given, ks)
    except Exception as error:  # noqa: BLE001  the end of the program
        return report(error, rank)
    return 0


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", type=Path, help="a run's directory, one of its checkpoints, or a model directory")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="as for training")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint after this step; default: the newest")
    parser.add_argument("--best", action="store_true", help="of a run: the one that checkpoint.best kept")
    parser.add_argument("--k", default="", help="pass@k and majority@k for these, such as 1,4,16; default: 1 and n")
    parser.add_argument("--by", metavar="COLUMN", help="accuracy by the values of a column of the data")
    parser.add_argument("--out", type=Path, help="write the numbers there, as JSON")
    parser.add_argument("--completions", type=Path, help="write every response there, as JSONL")
    return parser


def read_subject(given: argparse.Namespace) -> Subject:
    """The configuration of an evaluation, from a run or from the command line.

    Raises:
        ConfigError: no such run, model or key.
    """
    place, overrides = given.what, given.keys
    if is_model(place):
        if given.step is not None or given.best:
            raise ConfigError(f"--step and --best choose a checkpoint of a run; {place} is a model directory")
        return Subject(_model_config(place, overrides), place, None, None, str(place))
    found = choose_checkpoint(place, step=given.step, best=given.best)
    config = build([*overrides_of(found.config), *ALONE, *overrides])
    return Subject(config, source_model(found.config), found.path, found.step, f"{place}, step {found.step}")


def is_model(place: Path) -> bool:
    """Whether this is a Hugging Face model directory. A run's has a config.json, too, and no weights beside it."""
    return (place / "config.json").is_file() and any(place.glob("*.safetensors"))


def _model_config(place: Path, overrides: Sequence[str]) -> Config:
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    defaults = [f"data.validation_size={ALL_PROMPTS}"]
    if "data.train" not in named and "data.validation" in named:
        defaults += [t.replace("data.validation=", "data.train=") for t in overrides if "data.validation=" in t]
    return build([f"model.path={quoted(str(place))}", *defaults, *overrides])


def read_ks(text: str, n: int) -> list[int]:
    """``--k 1,4``: numbers up to the samples per prompt; 1 and n where it isn't given.

    Raises:
        ConfigError: something else.
    """
    try:
        ks = sorted({int(part) for part in text.split(",") if part} or {1, n})
    except ValueError:
        raise ConfigError(f"--k {text}: must be numbers with commas between them, such as 1,4,16") from None
    if wrong := [k for k in ks if not 1 <= k <= n]:
        raise ConfigError(f"--k {wrong[0]}: must be 1 to rollout.validation.n={n}")
    return ks


def evaluate(subject: Subject, *, by: str | None = None) -> list[Trajectory] | None:
    """Generate and score the validation responses; on the first rank, all of them.

    Args:
        by: a column that the prompts have to have.

    Raises:
        ConfigError: what the configuration asks for can't be measured.
    """
    import torch.distributed as dist

    from hybridengine.distributed.exchange import all_gather_trajectories
    from hybridengine.distributed.layout import RolloutLayout
    from hybridengine.distributed.world import World, init_process_group
    from hybridengine.engines.rollout.generate import generate
    from hybridengine.sampling import validation_params

    world = World.from_env()
    subject = replace(subject, config=resolve(subject.config))
    config = subject.config
    _validate(config, world)
    init_process_group(world, timeout_seconds=config.distributed.timeout_seconds)
    try:
        tokenizer, prompts, scorer = _inputs(subject)
        if by is not None:
            from hybridengine.evaluate.report import column

            column(prompts[0], by)
        engine = _engine(subject, world, tokenizer)
        mine = prompts[engine.replica :: engine.num_replicas]
        is_leader = RolloutLayout(world.size, config.rollout.tp).is_leader(world.rank)
        # The random numbers of a validation.
        found = generate(engine, mine, validation_params(config), seed=config.seed, step=-1)
        if is_leader:
            scorer.score(found)
        everything = all_gather_trajectories(found if is_leader else None, prompts)
        scorer.close()
        engine.close()
        return everything if world.is_main else None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _validate(config: Config, world: World) -> None:
    from hybridengine.validate.contradictions import validate

    try:
        validate(config, world)
    except ConfigError as error:
        left = [line for line in str(error).splitlines() if not line.startswith(TRAINING_ONLY)]
        if left:
            raise ConfigError("\n".join(left)) from None


def _inputs(subject: Subject) -> tuple[Any, list[Any], Any]:
    """Tokenizer, validation prompts and scorer, as a run makes them."""
    from hybridengine.assemble import load_tokenizer
    from hybridengine.config import as_texts
    from hybridengine.data.check import answer_needed_for
    from hybridengine.data.prompts import load_prompts
    from hybridengine.schedule.stop import StoppingScorer

    config = subject.config
    if not config.reward.fn and not config.reward.terms:
        raise ConfigError("reward.fn=null: a reward model scores in a run only; set reward.fn to what is measured")
    try:
        tokenizer = load_tokenizer(config, subject.model_path)
        scorer = StoppingScorer(
            config.reward, tokenizer, as_texts(config.rollout.stop),
            data=config.data, group_size=config.rollout.validation.n,
        )  # fmt: skip
        data = load_prompts(config.data, tokenizer, config.seed, answer_for=answer_needed_for(config.reward))
        scorer.check(data.validation)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    if not data.validation:
        raise ConfigError("no validation prompts: set data.validation, and data.validation_size above 0")
    return tokenizer, data.validation, scorer


def _engine(subject: Subject, world: World, tokenizer: Any) -> Any:
    """The rollout engine with the weights of the model or checkpoint."""
    from hybridengine.assemble import end_tokens
    from hybridengine.checkpoint.weights import CheckpointWeights
    from hybridengine.models.safetensors_source import SafetensorsSource
    from hybridengine.placement.parts import EngineOptions, describe_checkpoint, start_rollout

    config, trust = subject.config, subject.config.model.trust_remote_code
    options = EngineOptions(
        model_path=subject.model_path,
        max_model_len=config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens,
        eos_token_ids=end_tokens(tokenizer),
    )
    engine = start_rollout(config, world, options)
    params, _ = describe_checkpoint(subject.model_path, trust_remote_code=trust)
    weights: Any = SafetensorsSource(subject.model_path)
    if subject.checkpoint is not None:
        weights = CheckpointWeights(subject.checkpoint, subject.model_path, trust_remote_code=trust)
    engine.begin_update()
    for name in params:
        engine.load_weight(name, weights[name])
    engine.finish_update(subject.step or 0)
    return engine


def _write(found: list[Trajectory], subject: Subject, given: argparse.Namespace, ks: list[int]) -> None:
    from rich.console import Console

    from hybridengine.assemble import load_tokenizer
    from hybridengine.evaluate.report import summarize_evaluation, tables
    from hybridengine.report.completions import write_completions

    tokenizer, reward = load_tokenizer(subject.config, subject.model_path), subject.config.reward

    def text_of(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=reward.skip_special_tokens))

    summary = summarize_evaluation(found, reward, text_of, ks=ks, by=given.by)
    summary = {"name": subject.name, "step": subject.step, **summary}
    console = Console(highlight=False)
    for table in tables(summary):
        console.print(table)
    if given.completions is not None:
        write_completions(given.completions, found, tokenizer.decode, step=subject.step or 0)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
