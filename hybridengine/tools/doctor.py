"""Doctor: is this installation fit to run, and does a model fit this or another machine?

python -m hybridengine.doctor                  versions, devices, shared memory, limits, box copies, engines: each
                                               finding with its remedy; exit status 1 when something essential fails
python -m hybridengine.doctor memory --help    the memory bill of a run, here or on another machine
python -m hybridengine.doctor parity --help    do rollout engine, trainer and transformers agree about a model
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hybridengine.memory.host import host_gib
from hybridengine.report.summary import installed_version

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
    "train.engine=fsdp": ("hybridengine.engines.train.fsdp.engine", True, "reinstall: `make install`"),
    "train.engine=megatron": ("megatron", False, "pip install 'hybridengine[megatron]', or use train.engine=fsdp"),
    "rollout.engine=transformers": (
        "hybridengine.engines.rollout.transformers.engine",
        True,
        "reinstall: `make install`",
    ),
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
        check_packages, check_devices, check_shared_memory, check_limits, check_native, check_engines, check_sglang,
        check_kernels, check_sandbox, check_env,
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
            "sync.method=collective works without it; check IOMMU/ACS settings for NVLink or PCIe peer access",
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
    """/dev/shm (vLLM's tensor parallelism on CPU, NCCL) and memfd (the transfer between processes)."""
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
        yield Finding("memfd", WARN, str(error), "sync.method=collective works without it; pull needs Linux ≥ 3.17")


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
    """The compiled box copies."""
    from hybridengine import native, native_cuda

    found, remedy = native.status()
    runs = found in ("c++", "torch")
    yield Finding("csrc build", (WARN if remedy else OK) if runs else FAIL, found, remedy)
    found, remedy = native_cuda.status()
    yield Finding("CUDA box copy", WARN if remedy else OK, found, remedy)


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


def check_sglang() -> Iterator[Finding]:
    """SGLang has an environment of its own, found as ``rollout=sglang`` finds it."""
    from hybridengine.engines.rollout.sglang.traits import interpreter

    try:
        python = interpreter()
    except ValueError as error:
        problem, remedy = str(error).removeprefix("rollout.engine=sglang: ").rsplit("; ", 1)
        yield Finding("rollout.engine=sglang", WARN, problem, f"{remedy}, or use another engine")
        return
    ask = "from importlib.metadata import version; print(version('sglang'))"
    try:
        asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60)
        problem = "" if asked.returncode == 0 else f"{python} has no sglang"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"{python} does not run: {error}"
    if problem:
        yield Finding("rollout.engine=sglang", WARN, problem, "`make install-sglang`, or use another engine")
    else:
        yield Finding("rollout.engine=sglang", OK, f"sglang {asked.stdout.strip()} in {python.parent.parent}")


def check_kernels() -> Iterator[Finding]:
    """What the megatron engine takes on a GPU where it finds it."""
    from hybridengine import platform
    from hybridengine.engines.train.megatron.kernels import REMEDY, obstacle

    here = platform.of(platform.local_device(0))
    if here.runs_transformer_engine:
        problem = obstacle(here)
        yield Finding(
            "train.transformer_engine", WARN if problem else OK, problem or "transformer_engine imports",
            f"{REMEDY}, or go on with megatron's local layers" if problem else "",
        )  # fmt: skip


def check_sandbox() -> Iterator[Finding]:
    """How well programs that a model wrote can be confined here; runs one."""
    from hybridengine.rewards.code.sandbox import DEGRADED, STRICT, missing_protections, try_sandbox

    mode = DEGRADED if missing_protections() else STRICT
    try:
        try_sandbox(mode)
    except ValueError as error:
        yield Finding("reward=code", WARN, str(error), "only reward=code needs it")
        return
    if mode == STRICT:
        yield Finding("reward=code", OK, "sandbox=strict: every protection is there")
    else:
        yield Finding(
            "reward=code", WARN, f"sandbox=degraded: this kernel lacks {', '.join(missing_protections())}",
            "a newer kernel, or reward.kwargs.sandbox=degraded where that is enough",
        )  # fmt: skip


def check_env() -> Iterator[Finding]:
    """Environment variables that break sleeping or exporting memory."""
    from hybridengine.platform.cuda.memory import expandable_segments

    if setting := expandable_segments():
        name, _, value = setting.partition("=")
        yield Finding(
            name, WARN, value, f"unset {name}: expandable segments can't be put to sleep or exported over CUDA IPC"
        )  # fmt: skip


def installation_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="hybridengine doctor", title_justify="left")
    for column in ("", "check", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for item in findings:
        table.add_row(f"[{STYLES[item.status]}]{item.status}[/]", item.what, item.detail, item.remedy)
    return table


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / unit:g} {name}".strip()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split("+")[0].split(".") if part.isdigit()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The return value is the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(highlight=False)
    if arguments[:1] == ["parity"]:
        from hybridengine.tools.doctor_parity import parity_report

        return parity_report(arguments[1:], console)
    if arguments[:1] == ["memory"]:
        from hybridengine.tools.doctor_memory import memory_report  # needs packages that the check may find missing

        return memory_report(arguments[1:], console)
    parser = argparse.ArgumentParser(
        prog="python -m hybridengine.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Its own arguments are read above.
    parser.add_argument(
        "command", nargs="?", choices=["memory", "parity"], help="default: the check of this installation"
    )
    parser.parse_args(arguments)
    findings = check_installation()
    console.print(installation_table(findings))
    return 1 if any(item.status == FAIL for item in findings) else 0
