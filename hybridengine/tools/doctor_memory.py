"""The memory bill of a run that need not be possible here: of the model, config.json alone is read.

    python -m hybridengine.doctor memory +experiment=qwen2_5_7b model.path=/models/Qwen2.5-7B
    python -m hybridengine.doctor memory --config config.json --gpus 8 --gpu-gib 80 --host-gib 1000 rollout.tp=2
    python -m hybridengine.doctor memory +experiment=quickstart --gpus 0 --ranks 2 --host-gib 16

Exit status 0 when it fits, 1 when it does not, 2 for what has to be changed first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from hybridengine.config import Config
from hybridengine.config.compose import ConfigError, build
from hybridengine.memory.host import host_gib
from hybridengine.tools.advice import Changes, advise
from hybridengine.tools.bill import GIB, Bill, make_bill
from hybridengine.tools.bill_table import override_text, rich_table
from hybridengine.tools.machine import Machine, Offload
from hybridengine.tools.model_file import read_model
from hybridengine.tools.sizes import hf_config
from hybridengine.validate.contradictions import contradictions
from hybridengine.validate.model import check_shape

#: A GPU's memory is a little less than its name says; as much apart, and it is another GPU.
_SAME_GPU = 0.1


def memory_report(arguments: Sequence[str], console: Console) -> int:
    """``doctor memory``; the return value is the process's exit status."""
    given = parser().parse_intermixed_args(list(arguments))
    try:
        machine = machine_of(given, *gpus_here())
        config = build(_completed(given.overrides, given.config))
        if given.config is not None:
            config = replace(config, model=replace(config.model, path=given.config))
        model = read_model(config.model.path)
        check_billable(config, machine, model)
        offload = offload_of(config, machine.has_gpus)
        bill = make_bill(model, config, machine, offload)
        changes, changed = ({}, bill) if bill.fits else advise(model, config, machine, offload)
    except (ConfigError, ValueError, OSError) as error:
        console.print(f"hybridengine doctor: {error}", markup=False)
        return 2
    cpu = f"{machine.ranks} CPU ranks with {machine.host_gib:.0f} GiB"
    what = f"{machine.ranks} × {machine.device_gib:g} GiB" if machine.has_gpus else cpu
    console.print(rich_table(bill, f"{config.model.path} on {what}"))
    if machine.has_gpus:
        console.print(f"host memory: {bill.host / GIB:.0f} of {machine.host_gib:.0f} GiB", markup=False)
    for note in bill.notes:
        console.print(note, markup=False)
    if bill.fits:
        console.print("[bold green]fits[/]")
        return 0
    _print_advice(bill, changes, changed, console)
    return 1


def _print_advice(bill: Bill, changes: Changes, changed: Bill, console: Console) -> None:
    console.print("[bold red]does not fit[/]")
    for problem in bill.problems:
        console.print(f"  {problem}", markup=False)
    if changed.fits:
        console.print(f"with these it would: {override_text(changes)}", markup=False)
        return
    on_device = "more GPUs" if changed.host else "more memory"
    more = "more host memory" if changed.host > changed.host_limit else on_device
    console.print(f"no combination of keys was found that fits: use {more} or a smaller model", markup=False)
    if changes:
        console.print(f"closest: {override_text(changes)} ({'; '.join(changed.problems)})", markup=False)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m hybridengine.doctor memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("overrides", nargs="*", help="configuration, as for hybridengine.train")
    found.add_argument("--config", help="a config.json (or its directory); default: model.path")
    found.add_argument("--gpus", type=int, help="GPUs of the node; 0: a CPU machine; default: those here")
    found.add_argument("--gpu-gib", type=float, help="memory of one GPU; default: of those here")
    found.add_argument("--host-gib", type=float, help="memory of the node; needed where its GPUs are not those here")
    found.add_argument("--ranks", type=int, help="processes on a CPU machine; default: 1")
    return found


def machine_of(given: argparse.Namespace, count: int, size: float) -> Machine:
    """The machine that the flags describe, on one that has ``count`` GPUs of ``size`` GiB.

    Raises:
        ValueError: naming the flag, its value and what would be right.
    """
    if given.gpus is not None and given.gpus < 0:
        raise ValueError(f"--gpus {given.gpus}: must be 1 or more, or 0 for a CPU machine")
    for flag, value in (("--gpu-gib", given.gpu_gib), ("--host-gib", given.host_gib)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} {value:g}: must be a number of GiB above 0")
    if given.ranks is not None and given.ranks < 1:
        raise ValueError(f"--ranks {given.ranks}: must be 1 or more")
    gpus = count if given.gpus is None else given.gpus
    if gpus and given.ranks is not None:
        raise ValueError(f"--ranks {given.ranks}: {gpus} GPUs have a rank each; leave it out, or give --gpus 0")
    if not gpus and given.gpu_gib is not None:
        where = "this machine has no GPU" if given.gpus is None else "--gpus 0 is a CPU machine"
        raise ValueError(f"--gpu-gib {given.gpu_gib:g}: {where}; leave it out, or give the number of GPUs with --gpus")
    if gpus and given.gpu_gib is None and not size:
        raise ValueError("--gpu-gib: this machine has no GPU to take it from; give the memory of one")
    other_gpu = given.gpu_gib is not None and abs(given.gpu_gib - size) > _SAME_GPU * size
    if given.host_gib is None and (gpus != count or other_gpu):
        raise ValueError(
            "--host-gib: the GPUs are not those of this machine, so its memory is not taken either; give the "
            "memory of the node"
        )
    return Machine(
        ranks=gpus or given.ranks or 1,
        device_gib=(given.gpu_gib or size) if gpus else 0.0,
        host_gib=given.host_gib or host_gib(),
    )


def check_billable(config: Config, machine: Machine, model: dict[str, Any]) -> None:
    """Refuse what the program would refuse on that machine, and what the bill does not describe.

    Raises:
        ConfigError: every problem found, one per line.
    """
    if config.placement.name == "disaggregated":
        raise ConfigError(
            "placement.name=disaggregated: the bill is of ranks that train and generate in turn; use "
            "placement=colocated"
        )
    problems = contradictions(config, machine.world)
    if not problems:
        problems += check_shape(config, machine.world, hf_config(model))
    if problems:
        raise ConfigError("\n".join(problems))


def offload_of(config: Config, is_cuda: bool) -> Offload:
    """The ``memory`` section, as far as it takes effect: on CPU only with a directory to offload to."""
    section = config.memory
    if not is_cuda and section.offload_dir is None:
        return Offload(offload_optimizer=False, offload_weights=False)
    return Offload(offload_optimizer=section.offload_optimizer, offload_weights=section.offload_weights)


def gpus_here() -> tuple[int, float]:
    """How many, and GiB of the smallest."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0.0
    count = torch.cuda.device_count()
    return count, min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / GIB


def _completed(overrides: Sequence[str], config_json: str | None) -> list[str]:
    """Memory does not depend on the data file, and the model may be given as --config: neither is asked for."""
    found, names = list(overrides), {override.lstrip("+").split("=", 1)[0] for override in overrides}
    if not names & {"data.train", "data"}:
        found.append("data.train=arithmetic")
    if config_json is not None and not names & {"model.path", "model"}:
        found.append("model.path=.")
    return found
