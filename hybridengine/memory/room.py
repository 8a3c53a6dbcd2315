"""Room for a rollout, checked before the first step: what is not there at the start but stays once it is."""

from __future__ import annotations

import torch

from hybridengine.compose import ConfigError
from hybridengine.memory.residency import OPTIMIZER, ROLLOUT, TRAINER_PARAMS, Residency
from hybridengine.memory.tracker import GIB


def check_rollout_room(residency: Residency, device: torch.device, *, gpu_memory_utilization: float) -> None:
    """Refuse settings whose second rollout could not wake, on a GPU, with both engines up and everything awake.

    The rollout engine has sized its KV cache by what was free at its start and comes back at that size; the optimizer's
    state only comes into being at the first optimizer step. Where it stays, both have to fit.

    Raises:
        ConfigError: naming the keys.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    problem = shortage(
        residency, used=total - free, total=total, gpu_memory_utilization=gpu_memory_utilization
    )  # fmt: skip
    if problem is not None:
        raise ConfigError(problem)


def shortage(residency: Residency, *, used: int, total: int, gpu_memory_utilization: float) -> str | None:
    """What is wrong, if anything. ``used``: bytes on the device with everything there is on it."""
    if OPTIMIZER not in residency.movers or residency.leaves(OPTIMIZER):
        return None
    gone = sum(residency.movers[owner].nbytes() for owner in ROLLOUT.leaves if residency.leaves(owner))
    # Two moments per weight, of the weights' own size; there are none yet, except after a resumption.
    moments = 2 * residency.movers[TRAINER_PARAMS].nbytes() - residency.movers[OPTIMIZER].nbytes()
    lacking = used - gone + moments - total
    if lacking <= 0:
        return None
    lower = max(0.05, int(100 * (gpu_memory_utilization - lacking / total) - 1) / 100)
    return (
        f"memory.offload_optimizer=false: the optimizer's {moments / GIB:.1f} GiB come at the first step and stay, and "
        f"the rollout engine could not wake beside them ({lacking / GIB:.1f} GiB short of {total / GIB:.1f}); set "
        f"memory.offload_optimizer=true or rollout.gpu_memory_utilization={lower:.2f}"
    )
