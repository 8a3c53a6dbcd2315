"""AdamW on local shards, global-norm clipping, learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.config import TrainConfig
from hybridengine.memory.flat import zeros_like

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step ``step`` (0-based) of ``total_steps``.

    Linear warm-up over ``warmup_steps`` (the first step already moves: lr / warmup_steps), then from the
    peak to ``min_lr_ratio`` × peak at the last step. With lr 1, 2 warm-up steps and 5 steps in all, linear
    to 0: 0.5, 1, 0.667, 0.333, 0.

    Raises:
        ValueError: an unknown schedule.
    """
    if config.lr_schedule not in SCHEDULES:
        raise ValueError(f"train.lr_schedule is {config.lr_schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    # The peak is reached at the last warm-up step (at step 0 without warm-up).
    first = max(config.warmup_steps - 1, 0)
    progress = min(max((step - first) / max(total_steps - 1 - first, 1), 0.0), 1.0)
    decay = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.lr_schedule == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Weight decay applies to matrices; not to biases and norm weights, which have one dimension."""
    return len(shape) > 1 and not name.endswith(".bias")


class ShardedAdamW:
    """AdamW over each rank's local shards.

    AdamW is elementwise, so stepping plain local tensors that share the sharded parameters' memory equals
    stepping the distributed tensors, without their dispatch cost per operation.

    Args:
        shards: canonical name -> local shard (float32, may be empty on a rank).
        decayed: names that weight decay applies to.
        config: lr, betas, eps, weight_decay.
    """

    def __init__(self, shards: Mapping[str, Tensor], decayed: Iterable[str], config: TrainConfig) -> None:
        chosen = set(decayed)
        self.params = {name: nn.Parameter(shard, requires_grad=True) for name, shard in shards.items()}
        present = {name: param for name, param in self.params.items() if param.numel()}
        groups = [
            {"params": [p for n, p in present.items() if n in chosen], "weight_decay": config.weight_decay},
            {"params": [p for n, p in present.items() if n not in chosen], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw: torch.optim.AdamW | None = None
        if groups:
            self._adamw = torch.optim.AdamW(
                groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
            )
        self.steps = 0

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params.values() if param.grad is not None and param.numel()]

    def step(self, lr: float) -> None:
        """One update with the gradients on ``params``."""
        if self._adamw is not None:
            self._make_states()
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.steps += 1

    def zero_grad(self) -> None:
        for param in self.params.values():
            param.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """``{"exp_avg": {name: tensor}, "exp_avg_sq": ...}``, the memory itself; made (zero) when absent.

        Local tensors like the shards, including empty ones.
        """
        found: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, param in self.params.items():
            state = self._state(param)
            for key, tensors in found.items():
                tensors[name] = state[key]
        return found

    def set_steps(self, steps: int) -> None:
        """Number of updates behind the current moments (Adam's bias correction)."""
        self.steps = steps
        for param in self.params.values():
            if param.numel():
                self._state(param)["step"].fill_(float(steps))

    def _state(self, param: nn.Parameter) -> dict[str, Tensor]:
        if self._adamw is None or not param.numel():
            return {"exp_avg": torch.zeros_like(param.data), "exp_avg_sq": torch.zeros_like(param.data)}
        self._make_states()
        return self._adamw.state[param]

    def _make_states(self) -> None:
        """What AdamW itself sets up in its first step, but on one storage, and early enough for loading to fill it."""
        assert self._adamw is not None
        if self._adamw.state:
            return
        params = [param for param in self.params.values() if param.numel()]
        moments = zeros_like([param.data for param in params for _ in range(2)])
        for index, param in enumerate(params):
            self._adamw.state[param] = {
                "step": torch.tensor(float(self.steps), dtype=torch.float32, device=param.device),
                "exp_avg": moments[2 * index],
                "exp_avg_sq": moments[2 * index + 1],
            }


def clip_grad_norm(grads: list[Tensor], max_norm: float, group: dist.ProcessGroup | None) -> float:
    """Scale ``grads`` so that their global L2 norm over the ranks of ``group`` is at most ``max_norm``.

    Args:
        grads: this rank's disjoint share of the gradient, float32; scaled in place.
        max_norm: 0 measures without clipping.

    Returns:
        the norm before clipping, the same on all ranks.

    Raises:
        FloatingPointError: the norm is not finite (on all ranks alike).
    """
    norm = global_norm(grads, group)
    clip_to(grads, norm, max_norm)
    return norm


def global_norm(grads: list[Tensor], group: dist.ProcessGroup | None) -> float:
    """L2 norm of the gradient whose disjoint parts the ranks of ``group`` give. Raises as :func:`clip_grad_norm`."""
    device = grads[0].device if grads else torch.device("cpu")
    norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1, device=device)
    total = norms.double().square().sum()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    norm = float(total.sqrt())
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}; the weights were not updated")
    return norm


def clip_to(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of global norm ``norm`` in place, to ``max_norm`` where they are above it (0: never)."""
    if grads and max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
