"""Arms that can't run: refused by validation, or too large by the memory bill; each with its reason, before it starts.

The bill (``hybridengine doctor memory``) is of ranks that train and generate in turn. A disaggregated arm is billed as
two machines: one that only trains, with the ranks of the training pool, and one that only generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridengine.compare.arms import Arm
from hybridengine.config import Config
from hybridengine.config.compose import ConfigError, build
from hybridengine.memory.residency import GRADS, GRAPHS, KV_CACHE, OPTIMIZER, REFERENCE, ROLLOUT_WEIGHTS, TRAINER_PARAMS
from hybridengine.tools.bill import GIB, OPTIMIZE, ROLLOUT, TRAIN_PEAK, Bill, make_bill
from hybridengine.tools.doctor_memory import offload_of
from hybridengine.tools.machine import Machine, Offload
from hybridengine.tools.model_file import read_model
from hybridengine.validate.contradictions import validate

_TRAINING = (TRAINER_PARAMS, GRADS, OPTIMIZER, REFERENCE)
_GENERATION = (ROLLOUT_WEIGHTS, KV_CACHE, GRAPHS)


def why_not(
    arm: Arm, job: Sequence[str], machine: Machine, *, method: str = "auto", config_dirs: Sequence[Path] = ()
) -> str | None:
    """The reason for which the job can't run as this arm; None where it can, as far as can be told beforehand.

    Args:
        job: overrides of the user's.
        machine: that the comparison runs on; its ranks are those of the arm.
        method: the user's sync.method.
    """
    try:
        config = build([*job, *arm.overrides(method=method)], config_dirs)
        validate(config, machine.world)
    except ConfigError as error:
        return str(error)
    return too_large(arm, config, machine)


def too_large(arm: Arm, config: Config, machine: Machine) -> str | None:
    """By the memory bill; None where it fits, or where there is no bill for the model."""
    bills = bills_of(arm, config, machine)
    if bills is None:
        return None
    if len(bills) == 1:
        return "; ".join(bills[0].problems) or None
    training, generation = bills
    peaks = {
        "training": max(_less(training, phase, _GENERATION) for phase in (TRAIN_PEAK, OPTIMIZE)),
        "generation": _less(generation, ROLLOUT, _TRAINING),
    }
    ranks = {"training": arm.train_ranks, "generation": arm.rollout_ranks}
    if machine.has_gpus:
        limit = int(machine.device_gib * GIB)
        found = [
            f"{pool} needs {peak / GIB:.1f} GiB of {machine.device_gib:.1f} GiB per rank"
            for pool, peak in peaks.items()
            if peak > limit
        ]
        kv = [problem for problem in generation.problems if problem.startswith("KV cache")]
        return "; ".join([*found, *kv]) or None
    needed = sum(ranks[pool] * peak for pool, peak in peaks.items())
    if needed > machine.host_gib * GIB:
        return f"both pools need {needed / GIB:.1f} GiB of {machine.host_gib:.1f} GiB"
    return None


def bills_of(arm: Arm, config: Config, machine: Machine) -> list[Bill] | None:
    """One, or those of the training pool and of the rollout pool; None where nothing is known of the model."""
    if config.model.path == "embedded":
        return None  # a few megabytes
    try:
        model = read_model(config.model.path)
        if not arm.rollout_ranks:
            return [make_bill(model, config, machine, offload_of(config, machine.has_gpus))]
        stays = Offload(offload_optimizer=False, offload_weights=False)  # pools move nothing between steps
        whole = replace(config, placement=replace(config.placement, name="colocated"))
        return [
            make_bill(model, whole, replace(machine, ranks=ranks), stays) for ranks in (arm.train_ranks, arm.generating)
        ]
    except (ValueError, OSError):
        return None


def machine_here(ranks: int) -> Machine:
    """This machine with as many ranks.

    Raises:
        ValueError: it has fewer GPUs than that.
    """
    from hybridengine.memory.host import host_gib
    from hybridengine.tools.doctor_memory import gpus_here

    count, size = gpus_here()
    if count and ranks > count:
        raise ValueError(f"--ranks {ranks}: this machine has {count} GPUs, and a rank needs one")
    return Machine(ranks=ranks, device_gib=size if count else 0.0, host_gib=host_gib())


def _less(bill: Bill, phase: str, owners: Sequence[str]) -> int:
    """A phase's peak without what the other pool holds."""
    return sum(size for owner, size in bill.phases[phase].items() if owner not in owners)
