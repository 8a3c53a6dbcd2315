"""Degrees of parallelism, this rank's place in them, and megatron's process groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridengine.config import TrainConfig
from hybridengine.reshard.naming.decoder import Decoder
from hybridengine.reshard.naming.megatron import MegatronLayout


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank of ``tp * dp * pp``. Ranks are numbered as megatron does: TP fastest, then DP, then PP.

    Attributes:
        layout: the degrees, and the stage of each layer.
        vpp: model chunks per stage (1: no virtual pipeline).
        rank: this rank.
    """

    layout: MegatronLayout
    vpp: int
    rank: int

    @property
    def replica(self) -> int:
        """Data-parallel coordinate: ranks that share it see the same samples."""
        return self.rank // self.layout.tp % self.layout.dp

    @property
    def stage(self) -> int:
        return self.rank // (self.layout.tp * self.layout.dp)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    def layers(self, chunk: int, num_layers: int) -> range:
        """The layers of one of this stage's model chunks: stages take turns, chunk after chunk."""
        run = self.stage + chunk * self.layout.pp
        each = num_layers // (self.layout.pp * self.vpp)
        return range(run * each, (run + 1) * each)

    @property
    def speaks(self) -> bool:
        """One rank of each replica reports what all of its ranks know: the last stage's first."""
        return self.stage == self.layout.pp - 1 and self.tp_rank == 0


def data_parallel_size(train: TrainConfig, world_size: int) -> int:
    """Replicas of ``train.tp * train.pp`` ranks each.

    Raises:
        ValueError: the world size is no multiple of that.
    """
    ranks = train.tp * train.pp
    if world_size % ranks:
        raise ValueError(
            f"train.tp={train.tp} train.pp={train.pp}: {ranks} ranks hold one model, which must divide the "
            f"world size {world_size}"
        )
    return world_size // ranks


def layout_of(train: TrainConfig, decoder: Decoder, world_size: int) -> MegatronLayout:
    """The layout that the ``train`` section asks for.

    The vocabulary is padded to the next multiple of 64 where tp divides 64, as vLLM pads it: rows then have the same
    place in both engines.

    Raises:
        ValueError: degrees that do not fit the world size or the number of layers.
    """
    dp = data_parallel_size(train, world_size)
    runs = train.pp * train.vpp
    if decoder.num_layers % runs:
        what = f"train.pp={train.pp}" + (f" train.vpp={train.vpp}" if train.vpp > 1 else "")
        fits = [n for n in range(1, decoder.num_layers + 1) if decoder.num_layers % n == 0]
        raise ValueError(f"{what}: the model's {decoder.num_layers} layers must divide by {runs}; possible: {fits}")
    each = decoder.num_layers // runs
    return MegatronLayout(
        tp=train.tp,
        pp=train.pp,
        dp=dp,
        ep=train.ep,
        stages=tuple(layer // each % train.pp for layer in range(decoder.num_layers)),
        vocab_divisor=64 // math.gcd(64, train.tp),
    )


def start_groups(topology: Topology) -> None:
    """Megatron's process groups for these degrees; those of other degrees are taken down first. Collective.

    Their collectives have the default group's time limit, rounded up to minutes. Without dropout nothing is random:
    the tracker of random states is the one that does nothing.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    layout = topology.layout
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    assert dist.group.WORLD is not None
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(limit.total_seconds() / 60),
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
