"""What every placement needs: engines by name, the checkpoint's parameters, the settings of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.config import Config
from hybridengine.distributed.errors import agree
from hybridengine.distributed.links import node_of
from hybridengine.distributed.world import World
from hybridengine.engines.rollout.base import RolloutEngine
from hybridengine.engines.rollout.traits import engine_class
from hybridengine.engines.train.base import TrainEngine
from hybridengine.engines.train.describe import describe
from hybridengine.engines.train.loading import build_empty
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.plugins import load_object
from hybridengine.sync.plan.gather import gather_shard_map
from hybridengine.sync.plan.layouts import StoredTensor
from hybridengine.sync.plan.plan import ReshardPlan, build_plan
from hybridengine.sync.plan.spec import ParamSpec, ShardMap, TensorSlice
from hybridengine.sync.transfer.base import TransferSettings

#: name -> "module:class", imported when chosen. A new backend is one file and one line here.
TRAIN_ENGINES = {
    "fsdp": "hybridengine.engines.train.fsdp.engine:FSDPEngine",
    "megatron": "hybridengine.engines.train.megatron.engine:MegatronEngine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What engines are built with beside the configuration.

    Attributes:
        model_path: Hugging Face directory.
        max_model_len: tokens of the longest sequence.
        eos_token_ids: end tokens beside those of the model's generation config.
        total_steps: optimizer steps of the policy; 0 where nothing is trained.
        critic_steps: optimizer steps of a critic.
        with_entropy: the loss needs entropies.
        reference: the frozen reference model is needed.
    """

    model_path: Path
    max_model_len: int
    eos_token_ids: Sequence[int]
    total_steps: int = 0
    critic_steps: int = 0
    with_entropy: bool = False
    reference: bool = False


def start_rollout(config: Config, world: World, options: EngineOptions) -> RolloutEngine:
    """The rollout engine of ``config`` on the ranks of ``world``."""
    engine: RolloutEngine = engine_class(config.rollout)(
        options.model_path,
        config.rollout,
        world=world,
        max_model_len=options.max_model_len,
        seed=config.seed,
        eos_token_ids=options.eos_token_ids,
        trust_remote_code=config.model.trust_remote_code,
    )
    return engine


def start_train(config: Config, world: World, options: EngineOptions, **cut: Any) -> TrainEngine:
    """The training engine of ``config`` on the ranks of ``world``. ``cut``: how the fsdp engine is to shard."""
    if config.train.engine == "fsdp":
        cut["max_model_len"] = options.max_model_len
    engine: TrainEngine = load_object(TRAIN_ENGINES[config.train.engine], "train.engine")(
        options.model_path,
        config.train,
        world=world,
        temperature=config.rollout.temperature,
        total_steps=options.total_steps,
        with_entropy=options.with_entropy,
        reference=options.reference,
        trust_remote_code=config.model.trust_remote_code,
        **cut,
    )
    return engine


def transfer_settings(
    config: Config,
    world: World,
    *,
    group: dist.ProcessGroup | None = None,
    disaggregated: bool = False,
    weights_leave: bool = False,
) -> TransferSettings:
    """The ``sync`` section as transfers take it; arguments as TransferSettings has them."""
    return TransferSettings(
        world=world,
        group=group,
        bucket_mib=config.sync.bucket_mib,
        verify=config.sync.verify,
        timeout_seconds=config.distributed.timeout_seconds,
        disaggregated=disaggregated,
        weights_leave=weights_leave,
        weights_dir=config.memory.offload_dir if weights_leave else None,
    )


def plan_transfer(source: ShardMap, target: ShardMap, *, group: dist.ProcessGroup | None = None) -> ReshardPlan:
    """Collective: the plan between the two layouts; each rank reads from its own node what that has.

    Raises:
        ValueError: on every rank: they don't all describe the same layouts, or as :func:`build_plan`.
    """
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, (source.digest, target.digest), group=group)
    if other := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise ValueError(
            f"ranks {other} describe other layouts than rank 0: do all ranks have the same model and versions?"
        )
    return build_plan(source, target, node_of=node_of(group))


def describe_checkpoint(
    model_path: Path, *, trust_remote_code: bool = False
) -> tuple[dict[str, ParamSpec], list[StoredTensor]]:
    """A Hugging Face directory's parameters as it names them, in its dtypes, and the tensors of transformers' model.

    Experts are separate parameters there and stacked in the model; tied parameters appear once; persistent buffers are
    parameters, too.
    """
    source = SafetensorsSource(model_path)
    params, stored = describe(build_empty(model_path, trust_remote_code=trust_remote_code), source)
    typed = {
        name: replace(spec, dtype=source.dtype(name) if name in source else "float32") for name, spec in params.items()
    }
    return typed, stored


def rollout_shard_map(
    rollout: RolloutEngine | None, params: dict[str, ParamSpec], *, group: dist.ProcessGroup | None = None
) -> ShardMap:
    """Collective: the layout of all ranks' rollout engines, each describing its own tensors; None has none."""
    slices: Sequence[TensorSlice] = ()
    dtype: dict[str, str] = {}
    with agree("learning the rollout engine's layout", group):
        if rollout is not None:
            slices = rollout.layout(params)
            dtype = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in rollout.live_tensors().items()}
    return gather_shard_map(slices, params, dtype, group=group)
