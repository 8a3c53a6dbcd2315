"""Parity of a model, alone: rollout engine, trainer (packed and padded) and plain transformers score the same tokens.

    python -m hybridengine.doctor parity model.path=/models/Qwen2.5-0.5B
    python -m hybridengine.doctor parity model.path=/models/Qwen2.5-0.5B rollout=sglang train=fsdp_bf16
    torchrun --standalone --nproc-per-node 2 -m hybridengine.doctor parity model.path=/models/Llama rollout.tp=2

Needs no data and no reward; the keys are those of a run, whose context is rollout.max_model_len. Exit status 0 when the
sides agree, 1 when they don't, 2 for what has to be changed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from hybridengine.config import Config
from hybridengine.config.compose import ConfigError, build
from hybridengine.distributed.world import World, init_process_group
from hybridengine.parity.report import Parity, likely_cause
from hybridengine.validate.resolve import resolve

#: What a run has to be given and a probe does not use.
UNUSED = {"data.train": "data.train=arithmetic", "reward.fn": "reward.fn=exact_match"}


def parity_report(arguments: Sequence[str], console: Console) -> int:
    """``doctor parity``; the return value is the process's exit status."""
    if {"-h", "--help"} & set(arguments):
        console.print(__doc__, markup=False)
        return 0
    try:
        config = resolve(build([*UNUSED.values(), "validate_every=0", "parity.transformers=true", *arguments]))
        world = World.from_env()
        world.platform.prepare_process()
        from hybridengine.validate.contradictions import validate

        validate(config, world)
    except (ConfigError, ValueError) as error:
        console.print(f"hybridengine doctor: {error}", markup=False)
        return 2
    log = (lambda text: console.print(text, markup=False)) if world.is_main else (lambda text: None)
    init_process_group(world, timeout_seconds=config.distributed.timeout_seconds)
    try:
        parity, hf_config = probe_model(config, world, log=lambda text: None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    for line in parity.lines():
        log(line)
    if parity.wrong:
        log(f"differs by more than {parity.tolerance}; likely cause: {likely_cause(parity, hf_config)}")
        return 1
    log(f"agrees within {parity.tolerance}")
    return 0


def probe_model(config: Config, world: World, *, log: Callable[[str], None]) -> tuple[Parity, object]:
    """Start both engines on ``model.path``, sync once, and compare. Collective; the process group is there.

    Returns:
        what was found, and the model's Hugging Face configuration.
    """
    from hybridengine.assemble import prepare_model
    from hybridengine.engines.rollout.generate import generate
    from hybridengine.memory.residency import ROLLOUT, SCORE
    from hybridengine.parity.check import check_parity
    from hybridengine.parity.probes import choose_probes
    from hybridengine.placement.colocated import build_engines, time_share
    from hybridengine.placement.parts import EngineOptions
    from hybridengine.tracing import PhaseTimer

    path = Path(prepare_model(config, world))
    hf_config = _hf_config(config, path)
    length = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_tokens
    options = EngineOptions(model_path=path, max_model_len=length, total_steps=1, eos_token_ids=[])
    engines = build_engines(config, world, options, log_rank0=log)
    sharding = time_share(config, world, engines, PhaseTimer(), log_rank0=log)
    phases = sharding.phases
    try:
        sharding.enter_rollout_mode()

        def answers(prompts, params):  # type: ignore[no-untyped-def]
            with phases("rollout", ROLLOUT):
                found = generate(engines.rollout, prompts, params, seed=config.seed, step=0)
            everybody: list[list[object]] = [[]] * world.size
            dist.all_gather_object(everybody, found)
            return everybody[0]

        def before_scoring() -> None:
            phases.prepare(SCORE)

        parity = check_parity(
            config,
            world,
            path=path,
            hf_config=hf_config,
            max_model_len=length,
            train=engines.train,
            prompts=choose_probes(hf_config, length, vocabulary=int(hf_config.vocab_size)),
            generate=answers,
            before_scoring=before_scoring,
            parameters=sum(spec.numel for spec in engines.train.shard_map().params.values()),
        )
    finally:
        sharding.close()
    return parity, hf_config


def _hf_config(config: Config, path: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoConfig

    from hybridengine.models.facts import text_config

    return text_config(AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code))
