"""Check before the first step that a rollout will still fit once the optimizer state exists."""

from __future__ import annotations

from hybridengine.config.compose import ConfigError
from hybridengine.distributed.world import World
from hybridengine.memory.residency import OPTIMIZER, ROLLOUT, TRAINER_PARAMS, Residency, State
from hybridengine.memory.tracker import GIB


def check_rollout_room(residency: Residency, world: World, *, gpu_memory_utilization: float) -> None:
    """Refuse settings whose rollouts could not wake, on a device with memory of its own, with both engines up.

    The rollout engine has sized its KV cache by what was free when it started alone, and comes back at that size. The
    optimizer's state only comes into being at the first optimizer step. Where it stays, all of it has to fit.

    Raises:
        ConfigError: naming the keys.
    """
    memory = world.platform.memory(world.device)
    if memory is None:
        return
    world.platform.release_cached()
    memory = world.platform.memory(world.device)
    assert memory is not None
    problem = shortage(residency, used=memory.used, total=memory.total, gpu_memory_utilization=gpu_memory_utilization)
    if problem is not None:
        raise ConfigError(problem)


def shortage(residency: Residency, *, used: int, total: int, gpu_memory_utilization: float) -> str | None:
    """The problem in words; None where a rollout fits. ``used``: bytes on the device now."""
    leaving = sum(residency.movers[owner].nbytes() for owner in ROLLOUT.leaves if residency.leaves(owner))
    coming = sum(
        residency.movers[owner].nbytes()
        for owner in ROLLOUT.needs
        if owner in residency.movers and residency[owner] is not State.DEVICE
    )
    moments = 0
    if OPTIMIZER in residency.movers and not residency.rests_elsewhere(OPTIMIZER):
        # Two moments per weight, of the weights' own size; there are none yet, except after a resumption.
        moments = 2 * residency.movers[TRAINER_PARAMS].nbytes() - residency.movers[OPTIMIZER].nbytes()
    lacking = used - leaving + coming + moments - total
    if lacking <= 0:
        return None
    lower = max(0.05, int(100 * (gpu_memory_utilization - lacking / total) - 1) / 100)
    short = f"{lacking / GIB:.1f} GiB short of {total / GIB:.1f}"
    if moments:
        return (
            f"memory.offload_optimizer=false: the optimizer's {moments / GIB:.1f} GiB come at the first step and stay, "
            f"and the rollout engine could not wake beside them ({short}); set memory.offload_optimizer=true or "
            f"rollout.gpu_memory_utilization={lower:.2f}"
        )
    return (
        f"rollout.gpu_memory_utilization={gpu_memory_utilization}: the rollout engine could not wake beside what the "
        f"trainer keeps on the device ({short}); set rollout.gpu_memory_utilization={lower:.2f}, or let more of it "
        "leave (memory.offload_weights, memory.offload_optimizer)"
    )
