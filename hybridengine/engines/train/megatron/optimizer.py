"""Megatron's distributed optimizer behind the project's own learning rate, clipping and decay rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.config import TrainConfig
from hybridengine.engines.train.megatron.cpu import cuda_type_names
from hybridengine.engines.train.optim import clip_to, global_norm

MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnedRange(NamedTuple):
    """The part of a parameter whose master weights and moments this rank keeps: flat elements [start, stop)."""

    param: torch.nn.Parameter
    start: int
    stop: int
    master: Tensor  # float32 [stop - start]


class DistributedAdamW:
    """AdamW on this rank's share of the gradient buffers; the updated weights are gathered over its replicas.

    Megatron's buffers hold gradients in float32 for as long as the program runs; their contents count from the end of
    a backward pass to :meth:`step`.

    Attributes:
        steps: optimizer steps so far, the policy version.
    """

    def __init__(self, chunks: Sequence[Any], train: TrainConfig) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=0.0,
            weight_decay=train.weight_decay,
            adam_beta1=train.beta1,
            adam_beta2=train.beta2,
            adam_eps=train.eps,
            clip_grad=0.0,
            bf16=train.dtype == "bfloat16",
            params_dtype=torch.bfloat16 if train.dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=True,
        )
        with cuda_type_names(), torch.no_grad():
            chained = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        #: One for dense parameters, one for experts; without those that have nothing on this rank.
        self.parts = [part for part in chained.chained_optimizers if not part.is_stub_optimizer]
        self.steps, self._weight_decay = 0, train.weight_decay
        self._owner = {id(p): part for part in self.parts for g in part.optimizer.param_groups for p in g["params"]}
        for group in self._groups():
            group["fused"] = True

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.optimizer.param_groups

    # -- one step ------------------------------------------------------------------------------------

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip and update with the gradients in the buffers. Returns the norm before clipping.

        Raises:
            FloatingPointError: the gradient norm is not finite; on all ranks, nothing was updated.
        """
        try:
            for part in self.parts:
                part.prepare_grads()
            unique = [grad for part in self.parts for grad in part.get_main_grads_for_grad_norm()]
            norm = global_norm(unique, dist.group.WORLD)
            clip_to([p.grad for group in self._groups() for p in group["params"]], norm, max_grad_norm)
            for group in self._groups():
                group["lr"] = lr
                group["weight_decay"] = self._weight_decay * group["wd_mult"]
            for part in self.parts:
                part.step_with_ready_grads()
        finally:
            for part in self.parts:
                part.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    # -- state ---------------------------------------------------------------------------------------

    def ranges(self) -> Iterator[OwnedRange]:
        for part in self.parts:
            for param, (group, position) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(param)["param"]
                yield OwnedRange(param, span.start, span.end, part.optimizer.param_groups[group]["params"][position])

    def parameter_views(self) -> list[Tensor]:
        """Flat views of parameters: of float32 ones the master weights, of others what masters are written into."""
        groups = [group for part in self.parts for group in (*part.shard_float16_groups, *part.shard_fp32_groups)]
        return [view for group in groups for view in group]

    def moments(self, master: Tensor) -> dict[str, Tensor]:
        """``exp_avg`` and ``exp_avg_sq`` of master weights, the memory itself; made (zero) when absent."""
        state = self._state(master)
        if not state:
            state["step"] = torch.tensor(float(self.steps), dtype=torch.float32, device=master.device)
            state |= {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
        return {key: state[key] for key in MOMENTS}

    def existing(self) -> list[Tensor]:
        """Master weights apart from the model's own memory, and the moments that exist."""
        found = []
        for owned in self.ranges():
            if owned.master.untyped_storage()._cdata != owned.param.untyped_storage()._cdata:
                found.append(owned.master)
            state = self._state(owned.master)
            found += [state[key] for key in MOMENTS if key in state]
        return found

    def set_steps(self, steps: int) -> None:
        """Number of updates behind the current moments (Adam's bias correction)."""
        self.steps = steps
        for owned in self.ranges():
            self.moments(owned.master)
            self._state(owned.master)["step"].fill_(float(steps))

    @torch.no_grad()
    def publish(self) -> None:
        """Write the master weights into the model's parameters, and gather them over the replicas. Collective."""
        for part in self.parts:
            part._copy_main_params_to_model_params()
        for chunk in {id(c): c for part in self.parts for c in part.model_chunks}.values():
            chunk.start_param_sync(force_sync=True)

    def _state(self, master: Tensor) -> dict[str, Any]:
        return self._owner[id(master)].optimizer.state[master]
