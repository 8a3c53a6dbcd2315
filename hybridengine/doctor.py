"""Doctor: is this installation fit to run, and does a model fit this or another machine?

    python -m hybridengine.doctor
    python -m hybridengine.doctor memory +experiment=qwen2_5_7b model.path=/models/Qwen2.5-7B --gpus 8 --gpu-gib 80

The first checks versions, devices, shared memory, limits, the native copy and the engines, each finding with its
remedy; exit status 1 when something essential fails. The second prints the memory bill of a run that need not be
possible here: of the model it reads config.json only. Exit status 1 when it does not fit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30
OK, WARN, FAIL = "ok", "warn", "fail"
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}

#: Package -> (lowest version, whether a run is impossible without it, how to get it).
PACKAGES: dict[str, tuple[str, bool, str]] = {
    "torch": ("2.11", True, "scripts/install.sh (or `make install`)"),
    "transformers": ("5.16", True, "pip install 'transformers>=5.16'"),
    "hydra-core": ("1.3.2", True, "pip install 'hydra-core>=1.3.2'"),
    "safetensors": ("0.6", True, "pip install 'safetensors>=0.6'"),
    "vllm": ("0.32", False, "scripts/install.sh, or use rollout.engine=transformers"),
}
#: Modules that a run imports late, and what needs them. The first group is essential.
ENGINES: dict[str, tuple[str, bool, str]] = {
    "train.engine=fsdp": ("hybridengine.engines.train.fsdp", True, "reinstall: `make install`"),
    "train.engine=megatron": ("megatron", False, "pip install 'hybridengine[megatron]', or use train.engine=fsdp"),
    "rollout.engine=transformers": ("hybridengine.engines.rollout.transformers", True, "reinstall: `make install`"),
    "rollout.engine=vllm": ("vllm", False, "scripts/install.sh, or use rollout.engine=transformers"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``remedy`` is empty when there is nothing to do."""

    what: str
    status: str
    detail: str
    remedy: str = ""


def check_installation() -> list[Finding]:
    """Every check, in the order of the report."""
    checks = (
        check_packages, check_devices, check_shared_memory, check_limits, check_native, check_engines, check_kernels,
        check_env,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def check_packages() -> Iterator[Finding]:
    """Versions of what a run imports."""
    supported = sys.version_info >= (3, 11)
    yield Finding(
        "python", OK if supported else FAIL, sys.version.split()[0], "" if supported else "use Python 3.11 or newer"
    )
    for package, (lowest, essential, remedy) in PACKAGES.items():
        found = installed_version(package)
        if found is None:
            yield Finding(package, FAIL if essential else WARN, "not installed", remedy)
        elif _numbers(found) < _numbers(lowest):
            yield Finding(package, FAIL if essential else WARN, f"{found}, needs at least {lowest}", remedy)
        else:
            yield Finding(package, OK, found)


def installed_version(package: str) -> str | None:
    """Of a distribution; vLLM's CPU build is a distribution of another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_devices() -> Iterator[Finding]:
    """GPUs, their memory and whether each pair can read each other's; else the CPU."""
    import torch

    if not torch.cuda.is_available():
        smi = shutil.which("nvidia-smi")
        yield Finding(
            "devices",
            WARN if smi else OK,
            f"no usable GPU; {os.cpu_count()} CPU cores, {host_gib():.0f} GiB",
            "nvidia-smi is here, so torch was built without CUDA or the driver is too old: `make install-cuda`"
            if smi
            else "",
        )
        return
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    sizes = [torch.cuda.get_device_properties(i).total_memory / GIB for i in range(count)]
    yield Finding("devices", OK, f"{count} × {', '.join(sorted(names))}, {min(sizes):.0f} GiB each")
    lonely = [(i, j) for i in range(count) for j in range(count) if i != j and not _peers(i, j)]
    if lonely:
        yield Finding(
            "peer access", WARN, f"not between GPUs {lonely[0]} ({len(lonely)} pairs)",
            "handoff.method=collective works without it; check IOMMU/ACS settings for NVLink or PCIe peer access",
        )  # fmt: skip
    elif count > 1:
        yield Finding("peer access", OK, "between all GPUs")
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        if free < 0.9 * total:
            yield Finding(
                f"GPU {i}", WARN, f"only {free / GIB:.1f} of {total / GIB:.1f} GiB free",
                "another process holds the rest (nvidia-smi shows it); end it or lower rollout.gpu_memory_utilization",
            )  # fmt: skip


def _peers(i: int, j: int) -> bool:
    import torch

    return torch.cuda.can_device_access_peer(i, j)


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm (vLLM's tensor parallelism on CPU, NCCL) and memfd (the handoff between processes)."""
    try:
        free = shutil.disk_usage("/dev/shm").free
        small = free < GIB
        yield Finding(
            "/dev/shm", WARN if small else OK, f"{free / GIB:.2f} GiB free",
            "start the container with --shm-size=16g (or --ipc=host)" if small else "",
        )  # fmt: skip
    except OSError as error:
        yield Finding("/dev/shm", WARN, str(error), "mount a tmpfs on /dev/shm; NCCL and vLLM on CPU use it")
    try:
        fd = os.memfd_create("hybridengine-doctor")
        try:
            os.ftruncate(fd, 1 << 20)
            os.pwrite(fd, b"x", (1 << 20) - 1)
        finally:
            os.close(fd)
        yield Finding("memfd", OK, "weights can be shared between processes")
    except (OSError, AttributeError) as error:
        yield Finding("memfd", WARN, str(error), "handoff.method=collective works without it; pull needs Linux ≥ 3.17")


def check_limits() -> Iterator[Finding]:
    """ulimits that end runs in odd ways."""
    import torch

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 4096
    yield Finding(
        "open files", WARN if few else OK, _limit(files),
        "`ulimit -n 65536`: sockets between ranks and shards of checkpoints use descriptors" if few else "",
    )  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    tight = torch.cuda.is_available() and locked != resource.RLIM_INFINITY and locked < GIB
    yield Finding(
        "locked memory", WARN if tight else OK, _limit(locked, GIB, "GiB"),
        "`ulimit -l unlimited` (docker: --ulimit memlock=-1): InfiniBand registration and offloading lock pages"
        if tight else "",
    )  # fmt: skip
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        yield Finding(
            "address space", WARN, _limit(space, GIB, "GiB"), "`ulimit -v unlimited`: CUDA and vLLM reserve terabytes"
        )


def check_native() -> Iterator[Finding]:
    """The compiled box copy."""
    from hybridengine import native

    found = native.implementation()
    slow = "torch" in found
    yield Finding(
        "csrc build", WARN if slow else OK, found,
        "python -m hybridengine.native build (needs a C++ compiler): weight syncs are several times slower without"
        if slow else "",
    )  # fmt: skip


def check_engines() -> Iterator[Finding]:
    """Engines can be imported."""
    for name, (module, essential, remedy) in ENGINES.items():
        if "." not in module and importlib.util.find_spec(module) is None:
            yield Finding(name, WARN, f"{module} is not installed", remedy)
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  whatever stops the import is the finding
            yield Finding(name, FAIL if essential else WARN, f"{type(error).__name__}: {error}", remedy)
        else:
            yield Finding(name, OK, f"{module} imports")


def check_kernels() -> Iterator[Finding]:
    """What the megatron engine takes on a GPU where it finds it."""
    import torch

    from hybridengine.engines.train.megatron.kernels import REMEDY, obstacle

    if torch.cuda.is_available():
        problem = obstacle(is_cuda=True)
        yield Finding(
            "train.transformer_engine", WARN if problem else OK, problem or "transformer_engine imports",
            f"{REMEDY}, or go on with megatron's local layers" if problem else "",
        )  # fmt: skip


def check_env() -> Iterator[Finding]:
    """Environment variables that break sleeping or exporting memory."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            yield Finding(
                name, WARN, os.environ[name],
                f"unset {name}: expandable segments can't be put to sleep or exported over CUDA IPC",
            )  # fmt: skip


def installation_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="hybridengine doctor", title_justify="left")
    for column in ("", "check", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for item in findings:
        table.add_row(f"[{STYLES[item.status]}]{item.status}[/]", item.what, item.detail, item.remedy)
    return table


# -- memory --------------------------------------------------------------------------------------------------------


def memory_report(arguments: Sequence[str], console: Console) -> int:
    """``doctor memory``: the bill; 0 when it fits, 1 when not, 2 for what the user has to change first."""
    from hybridengine.compose import ConfigError, build
    from hybridengine.memory.advice import advise
    from hybridengine.memory.bill import Machine, make_bill
    from hybridengine.memory.bill_table import override_text, rich_table

    parser = argparse.ArgumentParser(prog="python -m hybridengine.doctor memory", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="configuration, as for hybridengine.train")
    parser.add_argument("--config", help="a config.json (or its directory); default: model.path")
    parser.add_argument("--gpus", type=int, help="GPUs of the node; 0: a CPU machine; default: those here")
    parser.add_argument("--gpu-gib", type=float, help="memory of one GPU; default: of those here")
    parser.add_argument("--host-gib", type=float, help="memory of the node; default: of this one")
    parser.add_argument("--ranks", type=int, default=1, help="processes on a CPU machine (with --gpus 0)")
    given = parser.parse_intermixed_args(list(arguments))
    try:
        config = build(_completed(given.overrides, given.config))
        model = read_model(given.config or config.model.path)
        count, size = _gpus_here()
        gpus = count if given.gpus is None else given.gpus
        if gpus and not (given.gpu_gib or size):
            raise ValueError("--gpu-gib: this machine has no GPU to take it from; say how much memory one has")
        machine = Machine(
            ranks=gpus or given.ranks,
            device_gib=(given.gpu_gib or size) if gpus else 0.0,
            host_gib=given.host_gib or host_gib(),
        )
        offload = offload_of(config, machine.is_cuda)
        bill = make_bill(model, config, machine, offload)
        changes, changed = ({}, bill) if bill.fits else advise(model, config, machine, offload)
    except (ConfigError, ValueError, OSError) as error:
        console.print(f"hybridengine doctor: {error}", markup=False)
        return 2
    what = f"{machine.ranks} × {machine.device_gib:g} GiB" if gpus else f"{machine.ranks} CPU ranks"
    console.print(rich_table(bill, f"{given.config or config.model.path} on {what}"))
    if machine.is_cuda:
        console.print(f"host memory: {bill.host / GIB:.0f} of {machine.host_gib:.0f} GiB", markup=False)
    for note in bill.notes:
        console.print(note, markup=False)
    if bill.fits:
        console.print("[bold green]fits[/]")
        return 0
    console.print("[bold red]does not fit[/]")
    for problem in bill.problems:
        console.print(f"  {problem}", markup=False)
    if changed.fits:
        console.print(f"with these it would: {override_text(changes)}", markup=False)
    else:
        console.print("no combination of keys makes it fit: use more GPUs or a smaller model", markup=False)
        if changes:
            console.print(f"closest: {override_text(changes)} ({'; '.join(changed.problems)})", markup=False)
    return 1


def read_model(path: str) -> dict[str, Any]:
    """The content of a config.json, of a model directory's, or of the embedded model's.

    Raises:
        ValueError: there is none.
    """
    if path == "embedded":
        from hybridengine.embedded import ensure_embedded

        path = str(ensure_embedded())
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: no config.json there; give a model directory or the file with --config")
    return dict(json.loads(file.read_text()))


def offload_of(config: Any, is_cuda: bool) -> Any:
    """The ``memory`` section, as far as it takes effect: on CPU only with a directory to offload to."""
    from hybridengine.memory.bill import Offload

    section = getattr(config, "memory", None)
    if section is None or not is_cuda and section.offload_dir is None:
        return Offload(offload_optimizer=False, offload_weights=False)
    return Offload(offload_optimizer=section.offload_optimizer, offload_weights=section.offload_weights)


def host_gib() -> float:
    """Physical memory of this node."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def _completed(overrides: Sequence[str], config_json: str | None) -> list[str]:
    """Memory does not depend on the data file, and the model may be given as --config: neither is asked for."""
    found, names = list(overrides), {override.lstrip("+").split("=", 1)[0] for override in overrides}
    if not names & {"data.train", "data"}:
        found.append("data.train=arithmetic")
    if config_json is not None and not names & {"model.path", "model"}:
        found.append("model.path=.")
    return found


def _gpus_here() -> tuple[int, float]:
    import torch

    if not torch.cuda.is_available():
        return 0, 0.0
    count = torch.cuda.device_count()
    return count, min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / GIB


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / unit:g} {name}".strip()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")[0].split(".") if part.isdigit()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The return value is the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(highlight=False)
    if arguments[:1] == ["memory"]:
        return memory_report(arguments[1:], console)
    if arguments:
        argparse.ArgumentParser(
            prog="python -m hybridengine.doctor",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ).parse_args(arguments)
    findings = check_installation()
    console.print(installation_table(findings))
    return 1 if any(item.status == FAIL for item in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
