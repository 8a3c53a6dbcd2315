"""Colocated placement: both engines on every rank, with shards that nest and a handoff between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.config import Config, RolloutConfig
from hybridengine.distributed.errors import agree
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.loading import SafetensorsSource, build_empty
from hybridengine.handoff.base import HandoffSettings, WeightHandoff
from hybridengine.handoff.registry import make_handoff
from hybridengine.reshard.gather import gather_shard_map
from hybridengine.reshard.layouts import StoredTensor
from hybridengine.reshard.naming import ARCHITECTURES, decoder_of, describe_model
from hybridengine.reshard.nesting import choose_fsdp_sharding
from hybridengine.reshard.plan import build_plan
from hybridengine.reshard.spec import ParamSpec, ShardMap

#: name -> "module:class", imported when chosen. A new backend is one file and one line here.
TRAIN_ENGINES = {
    "fsdp": "hybridengine.engines.train.fsdp:FSDPEngine",
    "megatron": "hybridengine.engines.train.megatron.engine:MegatronEngine",
}
ROLLOUT_ENGINES = {
    "vllm": "hybridengine.engines.rollout.vllm:VLLMEngine",
    "transformers": "hybridengine.engines.rollout.transformers:TransformersEngine",
    "sglang": "hybridengine.engines.separate.engine:SeparateEngine",
}
#: Those that ``rollout.process=separate`` puts into processes of their own.
SEPARATE_ENGINES = {
    "vllm": "hybridengine.engines.separate.engine:SeparateEngine",
    "sglang": "hybridengine.engines.separate.engine:SeparateEngine",
}


@dataclass(slots=True, kw_only=True)
class Engines:
    """The two engines and what moves weights between them."""

    train: TrainEngine
    rollout: RolloutEngine
    handoff: WeightHandoff


def build_engines(
    config: Config,
    world: World,
    *,
    model_path: Path,
    max_model_len: int,
    total_steps: int,
    eos_token_ids: Sequence[int],
    with_entropy: bool,
    reference: bool,
    say: Callable[[str], None],
) -> Engines:
    """Collective. The rollout engine first: the trainer's shards are chosen to nest inside its own.

    Args:
        max_model_len: tokens of the longest sequence.
        total_steps: optimizer steps of the run.
        say: prints one line about a choice, once.
    """
    trust = config.model.trust_remote_code
    with agree("starting the rollout engine"):
        rollout: RolloutEngine = rollout_class(config.rollout)(
            model_path,
            config.rollout,
            world=world,
            max_model_len=max_model_len,
            seed=config.seed,
            eos_token_ids=eos_token_ids,
            trust_remote_code=trust,
        )
    params = checkpoint_params(model_path, trust_remote_code=trust)
    target = rollout_shard_map(rollout, params)
    cut: dict[str, Any] = {}  # megatron's layout follows from its degrees alone
    if config.train.engine == "fsdp" and config.train.shard_order == "auto" and world.size > 1:
        choice = choose_fsdp_sharding(params, target, tp=config.rollout.tp, stored=stored_of(model_path, trust))
        cut = {"placements": lambda name, shape: choice.dims.get(name, 0), "rank_order": choice.order}
        say(choice.explain())
    train: TrainEngine = load_class(TRAIN_ENGINES, config.train.engine)(
        model_path,
        config.train,
        world=world,
        temperature=config.rollout.temperature,
        total_steps=total_steps,
        with_entropy=with_entropy,
        reference=reference,
        trust_remote_code=trust,
        **cut,
    )
    plan = build_plan(train.shard_map(), target)
    settings = HandoffSettings(
        world=world,
        bucket_mib=config.handoff.bucket_mib,
        verify=config.handoff.verify,
        timeout_seconds=config.distributed.timeout_seconds,
        weights_leave=config.memory.offload_weights and (world.is_cuda or config.memory.offload_dir is not None),
    )
    handoff = make_handoff(config.handoff.method, train, rollout, plan, settings)
    say(f"handoff: {handoff.method}\n{plan.explain()}")
    return Engines(train=train, rollout=rollout, handoff=handoff)


def rollout_class(rollout: RolloutConfig) -> Any:
    """The class of the engine that ``rollout.engine`` and ``rollout.process`` name."""
    return load_class(SEPARATE_ENGINES if rollout.process == "separate" else ROLLOUT_ENGINES, rollout.engine)


def load_class(registry: dict[str, str], name: str) -> Any:
    """The class that ``registry`` has under ``name``."""
    module, attribute = registry[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def checkpoint_params(model_path: Path, *, trust_remote_code: bool = False) -> dict[str, ParamSpec]:
    """The canonical parameters of a Hugging Face directory, in model order; tied ones once.

    Experts are separate parameters, as the checkpoint has them; transformers stacks them in its models.
    """
    source = SafetensorsSource(model_path)
    model = build_empty(model_path, trust_remote_code=trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any(name in ARCHITECTURES for name in model.config.architectures or []):
        decoder = decoder_of(model.config)
        shapes = decoder.shapes() if decoder.experts is not None else shapes
    return {
        name: ParamSpec(name, shape, source.dtype(name) if name in source else "float32")
        for name, shape in shapes.items()
    }


def stored_of(model_path: Path, trust_remote_code: bool) -> list[StoredTensor]:
    """The tensors that transformers keeps the model's parameters in."""
    model = build_empty(model_path, trust_remote_code=trust_remote_code)
    return describe_model(model.config, {name: tuple(p.shape) for name, p in model.named_parameters()})[1]


def rollout_shard_map(rollout: RolloutEngine, params: dict[str, ParamSpec]) -> ShardMap:
    """Collective: the layout of all ranks' rollout engines, each describing its own tensors."""
    slices: tuple[Any, ...] = ()
    with agree("learning the rollout engine's layout"):
        slices = rollout.layout(params)
    dtype = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in rollout.live_tensors().items()}
    return gather_shard_map(slices, params, dtype)
