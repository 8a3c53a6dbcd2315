"""This rank's place in the degrees of parallelism, and megatron's process groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridengine.sync.plan.naming.megatron import MegatronLayout


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
    def is_leader(self) -> bool:
        """Whether this rank reports for its replica: the first rank of the last stage does."""
        return self.stage == self.layout.pp - 1 and self.tp_rank == 0


def start_groups(topology: Topology) -> None:
    """Megatron's process groups for these degrees; those of other degrees are taken down first. Collective.

    Two models of the same degrees, such as a policy and its critic, share them.

    Their collectives have the default group's time limit, rounded up to minutes. Without dropout nothing is random:
    the tracker of random states is the one that does nothing.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    layout = topology.layout
    if ps.model_parallel_is_initialized():
        if _degrees_of_groups() == (layout.tp, layout.pp, topology.vpp, layout.ep):
            return
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


def _degrees_of_groups() -> tuple[int, int, int, int]:
    """tp, pp, vpp, ep of megatron's process groups as they are."""
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        ps.get_expert_model_parallel_world_size(),
    )
