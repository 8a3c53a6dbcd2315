"""Build the parts of one run from its Config, log what was chosen, run the loop, write the report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.algorithms.registry import make_algorithm
from hybridengine.algorithms.validate import algorithm_notes
from hybridengine.checkpoint.checkpointer import Checkpointer
from hybridengine.config import Config, as_texts
from hybridengine.config.compose import ConfigError
from hybridengine.data.check import answer_needed_for
from hybridengine.data.loader import PromptLoader
from hybridengine.data.prompts import PromptData, load_prompts
from hybridengine.distributed.errors import agree
from hybridengine.distributed.hang import hang_watch
from hybridengine.distributed.mailbox import Mailbox
from hybridengine.distributed.pools import ROLLOUT, Pools, split
from hybridengine.distributed.world import World, init_process_group
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.megatron.kernels import choose as choose_kernels
from hybridengine.final_report import report_failure, write_final_report
from hybridengine.interrupt import Interrupt
from hybridengine.loop import Trainer
from hybridengine.memory.phases import Phases
from hybridengine.memory.residency import SCORE, SCORE_VALUES, Residency
from hybridengine.memory.room import check_rollout_room
from hybridengine.memory.waterfall import as_rows
from hybridengine.models.facts import text_config
from hybridengine.monitors import Monitor
from hybridengine.parity.run_probe import TEXTS, RunProbe
from hybridengine.placement.beside import Beside, build_beside
from hybridengine.placement.colocated import build_engines, time_share
from hybridengine.placement.disaggregated import build_pool_engines, leaders, serve
from hybridengine.placement.near import NearLimit
from hybridengine.placement.oom import explained
from hybridengine.placement.parts import EngineOptions
from hybridengine.report.metrics import MetricLogger
from hybridengine.report.sizes import step_sizes
from hybridengine.report.summary import print_summary, summarize, write_summary
from hybridengine.rewards.scorer import Scorer
from hybridengine.schedule.base import RolloutSource
from hybridengine.schedule.colocated import ColocatedRollouts
from hybridengine.schedule.recorder import read_windows
from hybridengine.schedule.remote import RemoteRollouts
from hybridengine.schedule.stop import StoppingScorer
from hybridengine.sync.weight_sync import WeightSync
from hybridengine.tracing import PhaseTimer, write_chrome_trace
from hybridengine.validate.contradictions import warmup_problem
from hybridengine.validate.notes import model_notes, rate_notes

Log = Callable[[str], None]


#: Of a tokenizer, whichever kind it is.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@dataclasses.dataclass(kw_only=True)
class Inputs:
    """What the user gave, read and checked before anything expensive starts."""

    model_path: Path
    tokenizer: Any
    data: PromptData
    scorer: Scorer
    loader: PromptLoader
    total_steps: int


def run(config: Config, world: World, *, started: float) -> int:
    """The whole job on this rank. Returns the exit status.

    Args:
        started: ``time.perf_counter()`` when the program began.
    """
    watch = hang_watch(config, world)
    pools: Pools | None = None
    if config.placement.name == "disaggregated":
        pools = split(world, config.placement.rollout_ranks, timeout_seconds=config.distributed.timeout_seconds)
    else:
        init_process_group(world, timeout_seconds=config.distributed.timeout_seconds)
    interrupt = Interrupt()
    trainer: Trainer | None = None
    try:
        if watch is not None:
            watch.start()
        inputs = read_inputs(config, world, group=pools.weights if pools else None)
        if pools is not None and pools.role == ROLLOUT:
            serve(config, pools, build_pool_engines(config, pools, engine_options(config, inputs)), inputs.scorer)
            leave_process_group()
            return 0
        trainer = assemble(config, world, inputs, interrupt, pools)
        engine_start = time.perf_counter() - started
        tracker = trainer.phases.tracker
        tracker.watch = NearLimit(config, world)
        with explained(config, tracker.owners, phase=lambda: tracker.failed):
            trainer.run()
        finish(trainer, inputs, seconds_total=time.perf_counter() - started, seconds_engine_start=engine_start)
        if interrupt.status:  # the launcher ends all ranks as soon as one exits with it
            dist.barrier()
    except Exception as error:
        if trainer is not None:
            report_failure(trainer, error)
        raise
    finally:
        if trainer is not None:
            trainer.rollouts.close()
        if watch is not None:
            watch.close()
    leave_process_group()
    return interrupt.status


def leave_process_group() -> None:
    """At the end of a run. After a failure nobody does: others may still be in a collective, and an engine that could
    not be closed ends with the process and takes its own groups along."""
    if dist.is_initialized():  # vLLM takes the process group down with it
        dist.destroy_process_group()


def read_inputs(config: Config, world: World, *, group: dist.ProcessGroup | None = None) -> Inputs:
    """Tokenizer, data and rewards. ``group``: all ranks of the job.

    Raises:
        ConfigError: anything wrong with them, named by key or file.
    """
    model_path = prepare_model(config, world, group)
    try:
        tokenizer = load_tokenizer(config, model_path)
        scorer = StoppingScorer(
            config.reward, tokenizer, as_texts(config.rollout.stop),
            data=config.data, group_size=config.rollout.samples_per_prompt,
        )  # fmt: skip
        needed = answer_needed_for(config.reward)
        data = load_prompts(config.data, tokenizer, config.seed, answer_for=needed)
        scorer.check([*data.train, *data.validation])
        loader = PromptLoader(
            data.train,
            prompts_per_step=config.data.prompts_per_step,
            shuffle=config.data.shuffle,
            seed=config.seed,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    total_steps = config.steps if config.steps is not None else loader.num_steps(config.epochs)
    if problem := warmup_problem(config, total_steps):
        raise ConfigError(problem)
    return Inputs(
        model_path=model_path, tokenizer=tokenizer, data=data, scorer=scorer, loader=loader, total_steps=total_steps
    )


def context_of(config: Config) -> int:
    """Tokens of the longest sequence of the run."""
    return config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens


def engine_options(config: Config, inputs: Inputs) -> EngineOptions:
    """What both placements need to build engines."""
    algorithm = make_algorithm(config)
    epochs, mini_batches = config.algorithm.epochs, config.algorithm.mini_batches
    late = config.critic.warmup_steps if algorithm.needs_critic else 0
    return EngineOptions(
        model_path=inputs.model_path,
        max_model_len=context_of(config),
        total_steps=max(inputs.total_steps - late, 1) * epochs * mini_batches,
        critic_steps=inputs.total_steps * config.critic.epochs * mini_batches,
        eos_token_ids=end_tokens(inputs.tokenizer),
        with_entropy=algorithm.needs_entropy,
        reference=algorithm.needs_reference,
    )


def assemble(config: Config, job: World, inputs: Inputs, interrupt: Interrupt, pools: Pools | None) -> Trainer:
    """Collective over the training ranks: everything the loop needs. ``pools``: of a disaggregated job."""
    world = pools.world if pools else job
    output_dir = Path(config.output_dir)
    logger = MetricLogger(
        config.logging,
        output_dir,
        world,
        inputs.total_steps,
        run_config=dataclasses.asdict(config),
        decode=inputs.tokenizer.decode,
    )

    log_rank0, detail = logger.message, logger.detail
    for note in [*inputs.data.notes, step_sizes(config, job, inputs.total_steps)]:
        log_rank0(note)
    for note in algorithm_notes(config):
        log_rank0(note)
    for note in rate_notes(config.train, engine_options(config, inputs).total_steps):
        log_rank0(note)
    for note in model_notes(config, inputs.model_path, max_model_len=context_of(config)):
        log_rank0(note)
    if config.train.engine == "megatron":
        detail(choose_kernels(config.train, world.platform).explanation)
    for note in world.platform.notes():
        detail(note)
    log_rank0(f"starting the engines; how they are set up: {output_dir / 'run.log'}")
    algorithm = make_algorithm(config)
    timer = PhaseTimer(synchronize=world.platform.synchronize)
    build = _colocated if pools is None else _disaggregated
    train, rollouts, phases, beside = build(config, job, pools, inputs, timer, detail)
    return Trainer(
        config=config,
        world=world,
        train=train,
        rollouts=rollouts,
        algorithm=algorithm,
        validation=inputs.data.validation,
        checkpointer=Checkpointer(
            output_dir / "checkpoints", config.checkpoint.keep, config=dataclasses.asdict(config)
        ),
        logger=logger,
        phases=phases,
        interrupt=interrupt,
        monitor=Monitor(
            config.monitor,
            audits=config.reward.audit,
            log=log_rank0,
            parity=config.parity,
            decode=inputs.tokenizer.decode,
            active=world.is_main,
        ),
        total_steps=inputs.total_steps,
        critic=beside.critic,
        reward_model=beside.reward_model,
        probe=None if config.parity.probe == "off" else make_probe(config, world, inputs, log=detail, warn=log_rank0),
    )


def make_probe(config: Config, world: World, inputs: Inputs, *, log: Log, warn: Log) -> RunProbe:
    """The parity check after the first sync. ``world``: the training ranks."""
    from transformers import AutoConfig

    trust = config.model.trust_remote_code
    ranks = config.placement.rollout_ranks if config.placement.name == "disaggregated" else world.size
    return RunProbe(
        config=config,
        world=world,
        path=inputs.model_path,
        hf_config=text_config(AutoConfig.from_pretrained(inputs.model_path, trust_remote_code=trust)),
        max_model_len=context_of(config),
        texts=[prompt.token_ids for prompt in inputs.data.train[:TEXTS]],
        replicas=max(1, ranks // config.rollout.tp),
        log=log,
        warn=warn,
    )


def _colocated(
    config: Config, world: World, pools: Pools | None, inputs: Inputs, timer: PhaseTimer, log_rank0: Log
) -> tuple[TrainEngine, RolloutSource, Phases, Beside]:
    options = engine_options(config, inputs)
    with timer.phase("engine_start"):
        engines = build_engines(config, world, options, log_rank0=log_rank0)
        beside = build_beside(config, world, options, inputs.tokenizer)
    sharding = time_share(config, world, engines, timer, log_rank0=log_rank0, beside=beside.movers(config))
    with agree("checking that a rollout fits"):
        check_rollout_room(
            sharding.phases.residency, world, gpu_memory_utilization=config.rollout.gpu_memory_utilization
        )
    rollouts = ColocatedRollouts(
        config, world, sharding=sharding, scorer=inputs.scorer, loader=inputs.loader, phases=sharding.phases
    )
    return engines.train, rollouts, sharding.phases, beside


def _disaggregated(
    config: Config, job: World, pools: Pools | None, inputs: Inputs, timer: PhaseTimer, log_rank0: Log
) -> tuple[TrainEngine, RolloutSource, Phases, Beside]:
    assert pools is not None
    world, limit = pools.world, config.distributed.timeout_seconds
    options = engine_options(config, inputs)
    with timer.phase("engine_start"):
        engines = build_pool_engines(config, pools, options, log_rank0=log_rank0)
        beside = build_beside(config, world, options, inputs.tokenizer)
    assert engines.train is not None
    phases = Phases.over(Residency({}), timer, world.device)
    peers = leaders(pools, config.rollout.tp)
    rollouts = RemoteRollouts(
        config, world, train=engines.train, loader=inputs.loader, phases=phases,
        weight_sync=WeightSync(engines.transfer, group=pools.weights),
        mailbox=Mailbox(pools.messages, peers, timeout_seconds=limit) if world.is_main else None,
    )  # fmt: skip
    return engines.train, rollouts, phases, beside


def prepare_model(config: Config, world: World, group: dist.ProcessGroup | None = None) -> Path:
    """The model directory; the embedded model is made by the job's rank 0 when the cache has none."""
    if config.model.path != "embedded":
        return Path(config.model.path)
    from hybridengine.embedded import ensure_embedded

    with agree("preparing the embedded model", group):
        if world.is_main:
            ensure_embedded(verbose=True)
    return ensure_embedded()


def load_tokenizer(config: Config, model_path: Path) -> Any:
    """The tokenizer of the model, or of ``model.tokenizer``, with the user's chat template."""
    from transformers import AutoTokenizer

    path = config.model.tokenizer or model_path
    if Path(path).is_dir() and not any(found for name in TOKENIZER_FILES for found in Path(path).glob(name)):
        # transformers would make an empty one.
        raise ConfigError(
            f"model.tokenizer={path}: the directory has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy its files "
            "there, or name another directory"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer={path}: no tokenizer can be loaded from it ({error})") from None
    if config.model.chat_template:
        tokenizer.chat_template = Path(config.model.chat_template).read_text()
    return tokenizer


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokenizer's own end token; those of the generation config are the engine's to find."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def device_bytes(world: World) -> int | None:
    """Memory of this rank's GPU; None on a CPU, whose memory others use too."""
    memory = world.platform.memory(world.device)
    return None if memory is None else memory.total


def finish(trainer: Trainer, inputs: Inputs, *, seconds_total: float, seconds_engine_start: float) -> None:
    """Export the model, write summary.json, report.png and trace.json, print the table."""
    config, logger, tracker = trainer.config, trainer.logger, trainer.phases.tracker
    output_dir = Path(config.output_dir)
    files: dict[str, Path | str | None] = {}
    if config.checkpoint.export:
        files["model"] = output_dir / "model"
        trainer.phases.prepare(SCORE)
        trainer.train.export(output_dir / "model")
        if trainer.critic is not None:
            files["critic"] = output_dir / "critic"
            trainer.phases.prepare(SCORE_VALUES)
            trainer.critic.engine.export(output_dir / "critic")
    inputs.scorer.close()
    if trainer.world.is_main:
        summary = summarize(
            logger.history,
            name=config.name,
            world=trainer.world,
            seconds_total=seconds_total,
            seconds_engine_start=seconds_engine_start,
            extra={
                "model": str(files.get("model", "")) or None,
                "total_steps": trainer.total_steps,
                "transfer": trainer.rollouts.transfer,
                "alarms": [{"step": step, "rule": rule, "message": m} for step, rule, m in trainer.monitor.alarms],
                "memory": as_rows(tracker.last_step),
            },
        )
        write_summary(output_dir / "summary.json", summary)
        timer = trainer.phases.timer
        windows = read_windows(output_dir)
        replicas = [
            [(a - timer.started, b - timer.started) for w in found for a, b in w["busy"] if a >= timer.started]
            for found in windows
        ]
        write_chrome_trace(output_dir / "trace.json", timer.spans, replicas=replicas)
        files |= {"metrics": output_dir / "metrics.jsonl", "trace": output_dir / "trace.json"}
        if config.logging.plot:
            from hybridengine.report.plot import write_plot

            files["picture"] = output_dir / "report.png"
            write_plot(
                output_dir / "report.png", logger.history, trainer.phases.timer.spans, title=config.name,
                memory=tracker.last_step, memory_limit=device_bytes(trainer.world),
            )  # fmt: skip
        files["report"] = write_final_report(trainer, summary, memory_limit=device_bytes(trainer.world))
        if config.logging.completions:
            files["completions"] = (
                f"{output_dir / 'completions'} (python -m hybridengine.report.completions {output_dir})"
            )
        logger.close()
        print_summary(summary, logger.console, files)
    else:
        logger.close()
