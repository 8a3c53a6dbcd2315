"""ShardedPolicy: a PolicyModel under FSDP2, built unit by unit without ever holding the full model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from hybridengine import platform
from hybridengine.config import TrainConfig
from hybridengine.distributed.world import World
from hybridengine.engines.train.balancing import LoadBalance
from hybridengine.engines.train.describe import describe
from hybridengine.engines.train.fsdp.packing import packs
from hybridengine.engines.train.fsdp.policy import PolicyModel, ValueModel, decoder_layers
from hybridengine.engines.train.loading import (
    ValueSource,
    build_empty,
    check_names,
    load_buffers,
    materialise,
)
from hybridengine.engines.train.stacking import StoredSource, unstack
from hybridengine.models.buffers import persistent_buffers
from hybridengine.models.rotary import fix_rotary
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.naming import describe_value_model

#: (canonical name, shape) -> dimension to shard, or None for 0.
Placements = Callable[[str, tuple[int, ...]], "int | None"]

#: Full weights up to this size stay gathered from the first forward to the optimizer step.
KEEP_GATHERED_BYTES = 2 << 30
#: Decoder layers are gathered together until their full weights reach this size.
UNIT_BYTES = 64 << 20

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard_mesh(world: World, rank_order: Sequence[int] | None) -> DeviceMesh:
    """One-dimensional mesh over all ranks; shard i lives on global rank ``rank_order[i]``.

    Raises:
        ValueError: the order is not a permutation of the ranks, or torch is too old for it.
    """
    order = list(range(world.size)) if rank_order is None else list(rank_order)
    if sorted(order) != list(range(world.size)):
        raise ValueError(f"rank_order={order} is not a permutation of the {world.size} ranks")
    # FSDP2 takes a rank's shard from its rank in the process group, so the group itself must be permuted.
    if order == sorted(order):
        group = dist.new_group(order)
    elif "sort_ranks" in inspect.signature(dist.new_group).parameters:
        group = dist.new_group(order, sort_ranks=False)
    else:
        raise ValueError(
            f"train.shard_order=auto puts the shards on ranks {order}, which needs torch 2.13 and not "
            f"{torch.__version__}; set train.shard_order=rank"
        )
    return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=("fsdp",))


def _placement(dims: dict[nn.Parameter, int], param: nn.Parameter) -> Shard:
    return Shard(dims[param])


class ShardedPolicy:
    """The model of ``path``, sharded over ``mesh``; float32 shards, compute in ``config.dtype``.

    Gradients are summed over ranks, not averaged: the loss is already normalised by the global count.

    Args:
        head: "policy" answers with log-probabilities; "value" with values, its head zero where the checkpoint has none;
            "reward" with values, of a checkpoint that has a head.

    Attributes:
        shards: the model's own name -> sharded parameter. A tied head appears once, under the embedding's name.
        buffers: the model's own name -> persistent buffer, whole on every rank and not trained.
        canonical, stored: parameters as the checkpoint names them, and the model's tensors that hold them; the same
            except for stacked experts.
        balance: of the experts, where they are to be balanced.
        packs: its layers keep packed sequences apart.
        keeps_gathered: full weights stay between forward, backward and micro-batches until :meth:`reshard`.

    Raises:
        ValueError: a model this engine cannot load, or a shard dimension FSDP2 cannot cut evenly.
    """

    def __init__(
        self,
        path: Path,
        config: TrainConfig,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        temperature: float,
        with_entropy: bool = False,
        frozen: bool = False,
        placements: Placements | None = None,
        trust_remote_code: bool = False,
        head: str = "policy",
        max_model_len: int | None = None,
    ) -> None:
        if config.dtype not in _DTYPES:
            raise ValueError(f"train.dtype is {config.dtype!r}; it must be float32 or bfloat16")
        has_values = head != "policy"
        model = build_empty(path, trust_remote_code=trust_remote_code, values=has_values)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        width = model.config.hidden_size
        if has_values:
            self.canonical, self.stored = describe_value_model(model.config, self.shapes)
            checkpoint: SafetensorsSource = ValueSource(path, width, required=head == "reward")
        else:
            checkpoint = SafetensorsSource(path)
            self.canonical, self.stored = describe(model, checkpoint)
        source = StoredSource(checkpoint, self.stored)
        check_names(model, source)
        self.buffers = persistent_buffers(model)
        load_buffers(self.buffers, source)
        fix_rotary(model, max_model_len)
        self.packs = packs(model.config, trust_remote_code=trust_remote_code)
        for parameter in model.parameters():  # some are made not to train, such as a router's correction bias
            parameter.requires_grad_(parameter.requires_grad and not frozen)
        self.model, self.device, self.mesh = model, device, mesh
        self.balance = None if frozen else LoadBalance.of(config, model.config, device)
        platform.of(device).accelerate(model)
        self.policy = (ValueModel if has_values else PolicyModel)(
            model,
            temperature=temperature,
            chunk_tokens=config.logprob_chunk_tokens,
            with_entropy=with_entropy,
            activation_checkpointing=config.activation_checkpointing and not frozen,
            balance=self.balance,
        )
        dtype = _DTYPES[config.dtype]
        full_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        # A frozen model is used once per step and lives in host memory on CUDA: it never stays gathered.
        reshard = config.reshard_after_forward
        self.keeps_gathered = not frozen and (full_bytes <= KEEP_GATHERED_BYTES if reshard is None else not reshard)
        self.checkpoint_dtype = {
            tensor.name: source.dtype(tensor.name) if tensor.name in source else "float32" for tensor in self.stored
        }
        self.shard_dims = {name: self._shard_dim(name, placements) for name in self.shapes}
        self._shard(source, dtype, offload=frozen and platform.of(device).parks_frozen)
        self.shards: dict[str, DTensor] = dict(model.named_parameters())  # type: ignore[arg-type]
        assert all(isinstance(shard, DTensor) for shard in self.shards.values())

    # -- building ----------------------------------------------------------------------------------

    def _shard_dim(self, name: str, placements: Placements | None) -> int:
        shape, size = self.shapes[name], self.mesh.size()
        dim = (placements(name, shape) if placements else None) or 0
        if dim and shape[dim] % size:
            raise ValueError(f"{name}: dimension {dim} of {shape} does not divide into {size} even shards")
        return dim

    def _shard(self, source: StoredSource, dtype: torch.dtype, *, offload: bool) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        units: list[list[nn.Module]] = [*self._units(dtype), [self.policy]]
        for unit in units:
            owned = {names[id(p)] for module in unit for p in module.parameters() if p.is_meta}
            for module in unit:
                materialise(module, names, source)
            dims = {p: self.shard_dims[name] for name, p in self.model.named_parameters() if name in owned}
            fully_shard(
                unit if len(unit) > 1 else unit[0],  # type: ignore[arg-type]
                mesh=self.mesh,
                reshard_after_forward=not self.keeps_gathered,
                mp_policy=precision,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                shard_placement_fn=partial(_placement, dims),
            )
        modules = self._fsdp_modules()
        platform.of(self.device).accelerate_collectives(modules, self.mesh.get_group())
        for fsdp_module in modules:
            # Sum, not mean; plain SUM because gloo has no scaled reduction.
            fsdp_module.set_force_sum_reduction_for_comms(True)
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_reshard_after_backward(not self.keeps_gathered)

    def _units(self, dtype: torch.dtype) -> Iterator[list[nn.Module]]:
        """Runs of decoder layers that are gathered together."""
        unit: list[nn.Module] = []
        size = 0
        for layer in decoder_layers(self.model):
            unit.append(layer)
            size += sum(p.numel() for p in layer.parameters()) * dtype.itemsize
            if size >= UNIT_BYTES:
                yield unit
                unit, size = [], 0
        # What is left over goes with the embeddings, into the root's own unit.

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.policy.modules() if isinstance(module, FSDPModule)]

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, micro: Any) -> tuple[Tensor, Tensor | None]:
        return self.policy(micro)

    def accumulate(self, *, last: bool) -> None:
        """Call before each micro-batch's backward. While weights stay gathered, so do the gradients: they are
        reduced once, with the last micro-batch."""
        root = cast(FSDPModule, self.policy)
        root.set_is_last_backward(last)
        if self.keeps_gathered:
            root.set_requires_gradient_sync(last)

    def reshard(self) -> None:
        """Free the gathered weights. Needed before the shards change and before anyone reads parameters."""
        for module in self._fsdp_modules():
            module.reshard()

    # -- reading -----------------------------------------------------------------------------------

    def local_tensors(self) -> dict[str, Tensor]:
        """Tensor name of the shard map -> this rank's shard, the memory itself; the same objects at every call."""
        return {name: shard._local_tensor for name, shard in self.shards.items()}

    def memory_holders(self) -> list[Tensor]:
        """Every further tensor object on the shards' memory: a mover of that memory must re-point them too."""
        states = [module._get_fsdp_state() for module in self._fsdp_modules()]
        # One group of parameters per module until torch 2.12, a list of them since.
        groups = [
            group
            for state in states
            for group in (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])  # type: ignore[attr-defined]
            if group is not None
        ]
        params = [param for group in groups for param in group.fsdp_params]
        return [t for param in params for t in (param._sharded_param_data, param._sharded_local_tensor)]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: each canonical parameter in full, float32, one at a time, same order on all ranks."""
        shapes = {name: spec.shape for name, spec in self.canonical.items()}
        for tensor in self.stored:
            if tensor.whole:
                full = self.buffers[tensor.name]
            else:
                full = cast(DTensor, self.shards[tensor.name].detach()).full_tensor()
            yield from unstack(tensor, full, shapes)

    def like_shard(self, name: str, local: Tensor) -> DTensor:
        """A local tensor (an optimizer moment, a gradient) as a distributed tensor laid out like a parameter."""
        shard = self.shards[name]
        return DTensor.from_local(
            local, self.mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
