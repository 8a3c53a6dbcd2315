"""ShardedChunks: this rank's part of the model, its gradient buffers and optimizer, run by megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from hybridengine.config import TrainConfig
from hybridengine.distributed.errors import agree
from hybridengine.engines.train.balancing import LoadBalance
from hybridengine.engines.train.fsdp.policy import checkpointed
from hybridengine.engines.train.loading import ValueSource
from hybridengine.engines.train.megatron.batches import PaddedMicroBatch
from hybridengine.engines.train.megatron.cpu import cuda_is_identity
from hybridengine.engines.train.megatron.families import transformer_config
from hybridengine.engines.train.megatron.kernels import Kernels
from hybridengine.engines.train.megatron.layers import RotaryAngles, without_router_state
from hybridengine.engines.train.megatron.model import PolicyChunk, Scoring, ValueChunk, named_tensors
from hybridengine.engines.train.megatron.topology import Topology
from hybridengine.engines.train.megatron.weights import check_tensors, fill, mark_sharded
from hybridengine.models.safetensors_source import SafetensorsSource
from hybridengine.sync.plan.naming import megatron_shard_map
from hybridengine.sync.plan.naming.decoder import Decoder
from hybridengine.sync.plan.spec import ParamSpec, ShardMap

#: What the last stage does with a micro-batch's scores ([1, R] or [2, R]): the loss to go backward from.
MicroBatchLoss = Callable[[Tensor, PaddedMicroBatch], Tensor]


class ShardedChunks:
    """See the module's text. Building it is collective.

    Args:
        frozen: for scoring only: no gradient buffers, no recomputation.
        head: "policy"; or "value" or "reward", a model that gives values (as ShardedPolicy has it).

    Attributes:
        chunks: the model chunks of this rank's stage, in megatron's DistributedDataParallel unless frozen.
        shard_map: which slices of which checkpoint parameters every rank holds.
        tensors: this rank's parameters by the shard map's tensor names.

    Raises:
        ValueError: the checkpoint is not what config.json describes.
    """

    def __init__(
        self,
        path: Path,
        hf_config: Any,
        decoder: Decoder,
        topology: Topology,
        train: TrainConfig,
        kernels: Kernels,
        *,
        device: torch.device,
        temperature: float,
        with_entropy: bool = False,
        balance: LoadBalance | None = None,
        frozen: bool = False,
        head: str = "policy",
    ) -> None:
        self.decoder, self.topology = decoder, topology
        with agree("reading the checkpoint's index"):
            values = head != "policy"
            source = ValueSource(path, decoder.hidden, required=head == "reward") if values else SafetensorsSource(path)
            layout = megatron_shard_map(hf_config, topology.layout, dtype=train.dtype, values=values)
            self.shard_map = _with_dtypes(layout, source)
            check_tensors(source, self.shard_map, tied=decoder.tied)
        self.config = transformer_config(
            hf_config, decoder, topology.layout, train, kernels, vpp=topology.vpp, device=device
        )
        scoring = Scoring(temperature, train.logprob_chunk_tokens, with_entropy)
        angles = RotaryAngles(hf_config, device)
        with cuda_is_identity():
            self.chunks: list[Any] = [
                (ValueChunk if values else PolicyChunk)(
                    self.config,
                    decoder,
                    topology.layout,
                    kernels,
                    layers=topology.layers(chunk, decoder.num_layers),
                    vp_stage=chunk if topology.vpp > 1 else None,
                    angles=angles,
                    scoring=scoring,
                    max_length=hf_config.max_position_embeddings,
                    balance=balance,
                )
                for chunk in range(topology.vpp)
            ]
        for chunk in self.chunks:
            chunk.to(device)  # megatron makes a few small parameters on the CPU whatever it is told
        self.tensors = named_tensors(self.chunks)
        with agree("reading the checkpoint"):
            fill(self.tensors, self.shard_map, topology.rank, source)
        mark_sharded(self.tensors, self.shard_map, topology.rank)
        for chunk in self.chunks:
            chunk.requires_grad_(not frozen)
            if train.activation_checkpointing and not frozen:
                for layer in chunk.decoder.layers:
                    layer.forward = checkpointed(without_router_state(layer))

    def make_trainable(self) -> None:
        """Wrap the chunks so that gradients gather in buffers, summed over replicas and scattered. Collective."""
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [
            DistributedDataParallel(self.config, config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = finalize

    @property
    def buffers(self) -> list[Any]:
        return [b for chunk in self.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def run(
        self,
        batches: Sequence[PaddedMicroBatch],
        loss_fn: MicroBatchLoss,
        *,
        backward: bool,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """All micro-batches through the pipeline. ``loss_fn`` is called on the last stage, in order.

        ``before_last_backward`` is called once, on every rank, when it has no more than one backward pass to come (with
        virtual stages: one of each chunk).
        """

        def forward_step(batch_iterator: Iterator[PaddedMicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(batch_iterator)

            def loss(scores: Tensor) -> tuple[Tensor, Tensor, None]:
                # The token count is for megatron's own normalisation, which the engine does without.
                return loss_fn(scores, batch), torch.zeros((), dtype=torch.int), None

            return model(batch), loss

        self.config.no_sync_func = _announcing(before_last_backward) if backward else None
        iterators = [iter(batches) for _ in self.chunks]
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=batches[0].input_ids.shape[1],
                micro_batch_size=batches[0].input_ids.shape[0],
                forward_only=not backward,
            )

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def broadcast_from_last_stage(self, value: Any) -> Any:
        """Broadcast the last stage's ``value`` to all stages of this pipeline. Collective over the pipeline."""
        if self.topology.layout.pp == 1:
            return value
        holder = [value]
        source = ps.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(holder, src=source, group=ps.get_pipeline_model_parallel_group())
        return holder[0]


def finalize(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over replicas, tied stages and sequence-parallel ranks. No division: the loss is a share."""
    finalize_model_grads(chunks, None, **kwargs)


def _with_dtypes(shard_map: ShardMap, source: SafetensorsSource) -> ShardMap:
    """The parameters as the checkpoint stores them."""
    params = {
        name: ParamSpec(name, spec.shape, source.dtype(name) if name in source else spec.dtype)
        for name, spec in shard_map.params.items()
    }
    return ShardMap.from_holdings(params, shard_map.holdings, shard_map.dtype, shard_map.world_size)


def _announcing(call: Callable[[], None]) -> Callable[[], Any]:
    """Megatron leaves its "no gradient synchronisation yet" context right before a rank's last backward pass."""
    called = False

    @contextmanager
    def context() -> Iterator[None]:
        nonlocal called
        yield
        if not called:
            called = True
            call()

    return context
